"""A host: namespaces with a name and an address in the cluster."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts.namespaces import Namespaces
from tests.support.hosts.network import Switch, lose_sent
from tests.support.listening import Listener, command_line, listeners_among
from tests.support.warm import warm_python

ROOT = Path(__file__).parents[3]
OWN = {"/tmp": "1777", "/dev/shm": "1777", "/run": "755"}
"""Directories that every host has for itself, with their mode."""

LINK_S = 60.0


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process of a host; `pid` is the host's own count."""

    pid: int
    command: str


class Host(Namespaces):
    """One host of a cluster. `make_hosts` makes it.

    Args:
        name: as the others resolve it.
        address: on `eth0`.
        etc_hosts: text of /etc/hosts.
        shared: a directory that all hosts see; None for none.
        private: directories that are empty at first and this host's alone.
    """

    def __init__(
        self, name: str, address: str, etc_hosts: str, switch: Switch, shared: Path | None, private: list[Path]
    ) -> None:
        mounts = OWN | {str(path): "755" for path in private}
        needed = [ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(warm_python()).parent]
        needed += [shared] if shared else []
        kept = dict.fromkeys(str(path.resolve()) for path in needed)
        super().__init__({"name": name, "mounts": mounts, "kept": list(kept), "etc_hosts": etc_hosts})
        self.address = address
        self._switch = switch
        self._local_samples = list(mounts)
        self._services: set[int] = set()
        self._of_services = {Path("/run/mount")}  # mount's own
        self._at_first: set[Path] = set()

    def connected(self) -> None:
        """Count files from here on as left by processes."""
        self._at_first = set(self._own_files())

    def link_down(self) -> None:
        """Take the cable of `eth0` out, at the switch."""
        self._switch.set_link(self.name, "down")

    def link_up(self) -> None:
        """Put the cable of `eth0` in; returns once there is a carrier, which the kernel notices within a second.

        Raises:
            TimeoutError: there is none after `LINK_S`.
        """
        self._switch.set_link(self.name, "up")
        deadline = time.monotonic() + LINK_S
        while (state := self.path("/sys/class/net/eth0/operstate").read_text().strip()) != "up":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: eth0 is {state} {LINK_S:.0f} s after its cable was put in")
            time.sleep(0.01)

    def lose_received(self, lost: bool = True) -> None:
        """Silently drop all packets to this host; what it sends still arrives."""
        self._switch.lose_packets(self.name, lost)

    def lose_sent(self, lost: bool = True) -> None:
        """Silently drop all packets from this host; what is sent to it still arrives."""
        lose_sent(self, "eth0", lost)

    def power_off(self) -> None:
        """End the host as a power cut does: peers hear nothing of it, not even that connections are closed."""
        if self.is_up:
            self.link_down()
        self.kill()

    def processes(self) -> list[HostProcess]:
        """All processes but PID 1 and those of services (sshd, Slurm); zombies are not among them."""
        results = []
        for pid in self._pids():
            try:
                stat = (self.path("/proc") / str(pid) / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            session = int(stat.rpartition(")")[2].split()[3])
            command = command_line(self.path("/proc"), pid)
            if command and session not in self._services:
                results.append(HostProcess(pid, command))
        return results

    def sockets(self) -> set[Listener]:
        """Listening sockets, TCP and UDP, of services also."""
        return listeners_among(self.path("/proc"), self._pids(), network=self.path("/proc/1/net"))

    def left_files(self) -> list[Path]:
        """Files and directories that processes have left in /tmp, /dev/shm, /run and the private directories."""
        return sorted(
            path
            for path in set(self._own_files()) - self._at_first
            if not any(path.is_relative_to(top) for top in self._of_services)
        )

    def serve(self, command: list[str], *files: Path) -> None:
        """Start a service: it is not what a run leaves, and neither are its files.

        Args:
            command: of a program that stays in the foreground; what it prints is in /run/NAME.log.
            files: files and directories that are the service's.
        """
        log = Path("/run") / f"{Path(command[0]).name}.log"
        with self.path(log).open("w") as file:
            process = self.start(command, stdout=file, stderr=file)
        self._services.add(_pid_inside(process.pid))
        self._of_services |= {log, *files}

    def _pids(self) -> list[int]:
        return sorted(
            int(path.name) for path in self.path("/proc").iterdir() if path.name.isdigit() and path.name != "1"
        )

    def _own_files(self) -> Iterator[Path]:
        root = self.path("/")
        for top in self._local_samples:
            pending = [root / top.lstrip("/")]
            device = pending[0].stat().st_dev
            while pending:
                with contextlib.suppress(FileNotFoundError):  # what goes meanwhile
                    for path in pending.pop().iterdir():
                        status = path.lstat()
                        if status.st_dev == device:  # what is mounted there is not its own
                            yield Path("/") / path.relative_to(root)
                            pending += [path] if path.is_dir() and not path.is_symlink() else []


def _pid_inside(pid: int) -> int:
    """A process's pid as its own PID namespace counts."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])
