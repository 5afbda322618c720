"""What the rest of the system sees of a launch: the hosts of a run, in the order in which the launcher counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import ROLES

HostRole = Literal["train", "rollout", "reward"]


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a run.

    Args:
        index: from 0; the first one runs the driver and Ray's head.
        name: its host name.
        address: at which the others reach it.
        interface: the network interface that has the address; None if that is not known.
        role: what it is for; None for anything.
        gpus: that a run may use on it.
        cpu_slots: that a run may use on it.
        visible: CUDA_VISIBLE_DEVICES where its agent runs; None if it is not set.
    """

    index: int
    name: str
    address: str
    interface: str | None = None
    role: HostRole | None = None
    gpus: int = 0
    cpu_slots: int = 0
    visible: str | None = None

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts of a run."""

    hosts: tuple[Host, ...]

    @property
    def head(self) -> Host:
        """The host of the driver and of Ray's head."""
        return self.hosts[0]

    def as_json(self) -> list[dict[str, Any]]:
        """As values that JSON has."""
        return [asdict(host) for host in self.hosts]

    @classmethod
    def from_json(cls, hosts: Sequence[dict[str, Any]]) -> Cluster:
        """What `as_json` gave."""
        known = {field.name for field in fields(Host)}
        return cls(tuple(Host(**{name: each[name] for name in known & each.keys()}) for each in hosts))


def checked_role(role: str | None) -> HostRole | None:
    """A role of a host as a launcher names it.

    Raises:
        UserError: there is none of that name.
    """
    if role is None or role in ROLES:
        return role  # type: ignore[return-value]
    raise UserError(f"role {role!r} of this host: expected one of {', '.join(ROLES)}")


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names of hosts in a line, however many there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
