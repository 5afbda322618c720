"""Device maps: which devices a role runs on, as a recipe writes it, and what they are on a given set of nodes.

    cuda:0-3     GPUs 0 to 3, counted over the nodes in order
    cuda:0,2     GPUs 0 and 2
    cpu:0-1      two CPU slots; a slot holds one rank and need not be a core of its own
    node:2-3     every device of nodes 2 and 3: their GPUs, or their CPU slots where there is no GPU
    role:rollout every device of the nodes that the launcher has given to this role; of role:reward the first CPU slot

Nothing here starts anything.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine3d.errors import UserError, shortened

DeviceKind = Literal["cpu", "cuda"]
TRAIN, ROLLOUT, REWARD = ROLES = ("train", "rollout", "reward")
"""Roles of nodes: models that learn or score, engines, reward functions."""

MOST_NODES, MOST_GPUS = 1 << 14, 256
"""Nodes of a cluster, and GPUs of each."""
MOST_DEVICES = 1 << 17
"""Most devices of a role; no index is higher."""
MOST_CPU_SLOTS = 1024
"""Most CPU slots of one node: each holds a process."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster."""

    name: str
    """Name in errors: its address, or "this machine"."""
    gpus: int
    cpu_slots: int
    role: str | None = None
    """Role that a launcher has given it: "train", "rollout" or "reward"; None for anything."""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One device of a cluster."""

    node: int
    """Index of the node."""
    kind: DeviceKind
    index: int
    """Counted on its node."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """A parsed device map."""

    kind: Literal["cpu", "cuda", "node", "role"]
    indices: tuple[int, ...]
    role: str | None = None
    """Role of the nodes that it means, in place of indices."""

    @classmethod
    def parse(cls, text: str) -> DeviceMap:
        """Read a device map such as "cuda:0-3".

        Raises:
            UserError: unknown kind, empty or reversed range, or an index that stands twice.
        """
        shown = repr(shortened(text))
        example = 'expected such as "cuda:0-3", "cuda:0,2", "cpu:0-1", "node:2-3" or "role:rollout"'
        kind, colon, ranges = text.replace(" ", "").partition(":")
        if kind == "role" and ranges in ROLES:
            return cls("role", (), ranges)
        if kind == "role":
            raise UserError(f"device map {shown}: the role is {ranges!r}, expected {', '.join(ROLES)}")
        if kind not in ("cpu", "cuda", "node"):
            raise UserError(f"device map {shown}: the kind is {kind!r}, expected cpu, cuda, node or role")
        if not colon or not ranges:
            raise UserError(f"device map {shown} names no device, {example}")
        indices: dict[int, None] = {}
        for span in ranges.split(","):
            match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", span)
            if not match:
                raise UserError(f"device map {shown}: {shortened(span)!r} is not an index or a range, {example}")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise UserError(f"device map {shown}: the range {span} is empty, expected {last}-{first}")
            if last >= MOST_DEVICES:
                raise UserError(f"device map {shown}: the index {last}, expected below {MOST_DEVICES:,}")
            for index in range(first, last + 1):
                if index in indices:
                    raise UserError(f"device map {shown}: {kind}:{index} stands in it twice")
                indices[index] = None
        return cls(kind, tuple(indices))  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "role":
            return f"role:{self.role}"
        runs: list[list[int]] = []
        for index in self.indices:
            if runs and index == runs[-1][-1] + 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        return f"{self.kind}:" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

    def devices(self, nodes: Sequence[Node]) -> tuple[Device, ...]:
        """The devices on a cluster, in the order of the map.

        Raises:
            UserError: an index beyond what the cluster has.
        """
        if self.kind == "role":
            return self._of_role(nodes)
        if self.kind == "node":
            beyond = [index for index in self.indices if index >= len(nodes)]
            if beyond:
                raise UserError(f"device map {self}: there is no node {beyond[0]}, the cluster has {_nodes(nodes)}")
            if (total := sum(nodes[index].gpus or nodes[index].cpu_slots for index in self.indices)) > MOST_DEVICES:
                raise UserError(f"device map {self}: {total:,} devices, expected at most {MOST_DEVICES:,}")
            return tuple(device for index in self.indices for device in _all_devices(nodes[index], index))
        counts = [node.gpus if self.kind == "cuda" else node.cpu_slots for node in nodes]
        ends = list(itertools.accumulate(counts))
        beyond = [index for index in self.indices if index >= ends[-1]]
        if beyond:
            what = "GPU" if self.kind == "cuda" else "CPU slot"
            raise UserError(
                f"device map {self}: there is no {self.kind}:{beyond[0]}, "
                f"the cluster ({_nodes(nodes)}) has {_count(ends[-1], what)}"
            )
        devices_of_role = [(bisect.bisect_right(ends, index), index) for index in self.indices]
        return tuple(Device(node, self.kind, index - ends[node] + counts[node]) for node, index in devices_of_role)

    def _of_role(self, nodes: Sequence[Node]) -> tuple[Device, ...]:
        numbers = [number for number, node in enumerate(nodes) if node.role == self.role]
        if not numbers:
            roles = ", ".join(sorted({node.role for node in nodes if node.role is not None}))
            roles = f"has {roles}" if roles else "has none with a role"
            raise UserError(f"device map {self}: no node has this role, the cluster ({_nodes(nodes)}) {roles}")
        if self.role == REWARD:
            return (Device(numbers[0], "cpu", 0),)
        return tuple(device for number in numbers for device in _all_devices(nodes[number], number))


def check_node_roles(devices: Mapping[str, Sequence[Device]], nodes: Sequence[Node]) -> None:
    """Check that every role is on nodes that are for it, or for anything.

    Raises:
        UserError: names the role, the node and what the node is for.
    """
    for role, devices_of_role in devices.items():
        required = role if role in (ROLLOUT, REWARD) else TRAIN
        for device in devices_of_role:
            node = nodes[device.node]
            if node.role is not None and node.role != required:
                raise UserError(
                    f"placement.{role}: {device.kind} {device.index} of {node.name}, whose role is {node.role}; "
                    f'expected nodes for {required}, such as "role:{required}"'
                )


def pool_devices(
    roles: Mapping[str, str], pools: Mapping[str, str], nodes: Sequence[Node]
) -> dict[str, tuple[Device, ...]]:
    """The devices of each role.

    Args:
        roles: role -> name of a pool, or a device map of its own. Roles whose devices overlap share them.
        pools: name -> device map. Pools are apart from each other: no device is in two.
        nodes: the cluster.

    Raises:
        UserError: a device map that is wrong or does not fit the cluster, or two pools with a device in common.
    """
    named = {name: _devices(f"placement.pools.{name}", text, nodes) for name, text in pools.items()}
    owner: dict[Device, str] = {}
    for name, devices in named.items():
        for device in devices:
            if device in owner:
                shared = f"{device.kind} {device.index} of {nodes[device.node].name}"
                raise UserError(
                    f"placement.pools.{name}: {shared} is in pool {owner[device]} too; pools share no device "
                    "(roles that name one pool do)"
                )
            owner[device] = name
    devices_by_role = {
        role: named[text] if text in named else _devices(f"placement.{role}", text, nodes, pools)
        for role, text in roles.items()
    }
    check_node_roles(devices_by_role, nodes)
    return devices_by_role


def highest_cpu_slot(texts: Sequence[str]) -> int:
    """Count the CPU slots that a single machine must offer for these device maps; `MOST_CPU_SLOTS` are the most.

    Names of pools, and maps that are wrong, count for nothing: `pool_devices` has the errors for those.
    """
    slots = 0
    for text in texts:
        with contextlib.suppress(UserError):
            parsed = DeviceMap.parse(text)
            slots = max(slots, max(parsed.indices) + 1 if parsed.kind == "cpu" else 0)
    return min(slots, MOST_CPU_SLOTS)


def _devices(key: str, text: str, nodes: Sequence[Node], pools: Mapping[str, str] | None = None) -> tuple[Device, ...]:
    if pools and ":" not in text:
        raise UserError(f"{key}: there is no pool {shortened(text)!r}, expected {', '.join(pools)} or a device map")
    try:
        devices = DeviceMap.parse(text).devices(nodes)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if len({device.kind for device in devices}) > 1:
        raise UserError(f"{key}: {shortened(text)} mixes nodes with GPUs and nodes without")
    return devices


def _all_devices(node: Node, number: int) -> list[Device]:
    kind: DeviceKind = "cuda" if node.gpus else "cpu"
    return [Device(number, kind, index) for index in range(node.gpus or node.cpu_slots)]


def _nodes(nodes: Sequence[Node]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
