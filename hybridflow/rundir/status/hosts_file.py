"""The hosts of a run in its directory: who they are, and which variables of the network are in force on each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine3d.input_files import MOST_LIST_BYTES
from engine3d.json_records import read_record
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import HOSTS


@dataclass(frozen=True, slots=True)
class NetworkSetting:
    """A variable that is in force on a host.

    Args:
        name: of the variable.
        value: of it.
        origin: where that comes from: "environment", "preset roce", "interface eth0" or "recipe".
    """

    name: str
    value: str
    origin: str

    def __str__(self) -> str:
        value = f'"{self.value}"' if self.value.startswith("=") else self.value  # as NCCL's exact names
        return f"{self.name}={value} ({self.origin})"


@dataclass(frozen=True, slots=True)
class RunHost:
    """A host of a run.

    Args:
        name: host name.
        address: in the cluster's network.
        interface: that has the address; None if it is not known.
        role: that a launcher gave it; None for anything.
        gpus: that the run may use there.
        cpu_slots: likewise.
        settings: of its network.
        shares_disk: whether it sees the run's directory; what its ranks log is sent to host 0 where it does not.
    """

    name: str
    address: str
    interface: str | None
    role: str | None
    gpus: int
    cpu_slots: int
    settings: tuple[NetworkSetting, ...] = ()
    shares_disk: bool = True


def write_hosts(directory: Path, hosts: Sequence[RunHost]) -> None:
    """Write them, host 0 first. Raises OSError."""
    replace_file(directory / HOSTS, json.dumps([asdict(host) for host in hosts], indent=1) + "\n")


def read_hosts(directory: Path) -> list[RunHost]:
    """The hosts of a run; none of one that no launcher has started.

    Raises:
        UserError: the file is damaged.
    """
    return list(read_record(directory / HOSTS, tuple[RunHost, ...], MOST_LIST_BYTES) or ())
