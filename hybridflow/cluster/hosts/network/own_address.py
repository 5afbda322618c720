"""Have every process of a run on several hosts listen at the cluster's address of its host, and at no other.

Ray's servers and workers know the loopback interface or all interfaces. So a library of some lines (`own_address.c`) is
preloaded into all that a launch starts: it puts the cluster's address in the place of all addresses, and a port of
`network.ports` in the place of any. It is compiled when the launch begins, and lies in memory of the agent: no file of
it is left, however the agent ends.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.cluster.hosts.network.network_settings import PortRange

LISTEN_AT, LISTEN_PORTS, PRELOAD = "HYBRIDFLOW_LISTEN_AT", "HYBRIDFLOW_LISTEN_PORTS", "LD_PRELOAD"
COMPILERS = ("cc", "gcc", "clang")
_SOURCE = Path(__file__).with_suffix(".c")
_COMPILE_S = 60.0


@dataclass(frozen=True)
class OwnAddress:
    """The library, as long as this process lives.

    Args:
        path: under which other processes of this user find it.
        address: of this host in the cluster, in numbers.
        ports: of the run; None for any.
    """

    path: str
    address: str
    ports: PortRange | None

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables with which a process listens there.

        Args:
            environ: that the process has otherwise.
        """
        others = [each for each in environ.get(PRELOAD, "").split(":") if each and not each.startswith("/proc/")]
        ports = {} if self.ports is None else {LISTEN_PORTS: f"{self.ports.first}-{self.ports.last}"}
        # By itself Ray preloads nothing into its workers.
        preload = {PRELOAD: ":".join([self.path, *others]), "RAY_LD_PRELOAD_ON_WORKERS": "1"}
        return preload | {LISTEN_AT: self.address} | ports


def needs_library(address: str) -> bool:
    """Whether others reach an address, in numbers, so that it matters where Ray listens."""
    return not ipaddress.ip_address(address.partition("%")[0]).is_loopback


def compiler() -> str | None:
    """A C compiler of this host."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def prepare(address: str, ports: PortRange | None) -> OwnAddress:
    """Compile the library.

    Args:
        address: of this host in the cluster, in numbers.
        ports: that are to be taken; None for any.

    Raises:
        UserError: there is no C compiler on this host, or it fails.
    """
    program = compiler()
    if program is None:
        raise UserError(
            f"no C compiler on this host ({', '.join(COMPILERS)}): without it Ray's servers would listen at all of its "
            "addresses; expected one, as the package gcc has it"
        )
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "own_address.so"
        command = [program, "-shared", "-fPIC", "-O1", "-o", str(built), str(_SOURCE), "-ldl"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{program} does not run: {error}") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise UserError(f"{program} does not compile {_SOURCE.name}: {lines[-1]}")
        library = built.read_bytes()
    descriptor = os.memfd_create("own_address")
    os.write(descriptor, library)
    return OwnAddress(f"/proc/{os.getpid()}/fd/{descriptor}", address.partition("%")[0], ports)
