"""Hosts of a run, in the order in which the launcher counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import ROLES, Node

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
        node_id: Ray's id of its node; empty before it has one.
    """

    index: int
    name: str
    address: str
    interface: str | None = None
    role: HostRole | None = None
    gpus: int = 0
    cpu_slots: int = 0
    visible: str | None = None
    node_id: str = ""

    @property
    def node(self) -> Node:
        """The host as placement counts it."""
        return Node(self.name, self.gpus, self.cpu_slots, self.role)

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"


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
