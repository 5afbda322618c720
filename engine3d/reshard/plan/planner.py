"""The plan of a weight transfer: which rank sends which elements to which, from shapes alone.

Sources and targets hold boxes of the same HuggingFace tensors. A transfer is made of their
intersections. The geometry of equal targets (the same rank of several engines) is worked out once. Everything is
integer arithmetic in a fixed order: every process that makes the plan gets the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine3d.reshard.describe.shards import RankShards
from engine3d.reshard.plan.geometry import Offers, TargetNeeds, needs_of, offers_of
from engine3d.reshard.plan.runs import Integers, concatenated
from engine3d.reshard.plan.transfers import Link, Plan, Segments, Transfer

_SMALLEST_SHARE = 2**20
_SHARES_PER_SOURCE = 8


def make_plan(
    sources: Sequence[RankShards], targets: Sequence[RankShards], tensors: Mapping[str, tuple[int, ...]]
) -> Plan:
    """Give every element that a target needs one source, the nearest that holds it.

    Of several equally near ones it is the one with the fewest bytes to send so far; between nodes, first one on the
    node with the fewest bytes to send to other nodes. What has one possible source is counted before anything is
    chosen.

    Args:
        sources: the trainer's ranks.
        targets: the ranks of all engines. Their aliased buffers need nothing.
        tensors: shape of every tensor of the HuggingFace model, by name.

    Raises:
        UserError: a target needs a tensor, or elements of one, that no source holds, or a box does not lie within its
            tensor's shape.
        EngineError: boxes of two sources overlap without being equal, or a holding reaches outside its buffer.
    """
    offers = offers_of(sources, targets, tensors)
    needs = needs_of(targets, offers, tensors)
    shares = _assigned(_Locations.of(sources, targets), offers, needs)
    transfers: list[Transfer] = []
    for (source, target), (link, ranges) in sorted(shares.items(), key=lambda item: item[0]):
        segments, nbytes = _segments(offers, needs[target], source, ranges)
        transfers.append(Transfer(source, target, link, segments, nbytes))
    return Plan(
        transfers=tuple(transfers),
        aliases=tuple(target.aliases for target in targets),
        bytes_needed=sum(need.nbytes for need in needs),
        bytes_aliased=sum(need.nbytes_aliased for need in needs),
    )


@dataclass(frozen=True, slots=True)
class _Locations:
    """Node and device of every source and target as numbers."""

    source_node: Integers
    source_device: Integers
    target_node: Integers
    target_device: Integers

    @classmethod
    def of(cls, sources: Sequence[RankShards], targets: Sequence[RankShards]) -> _Locations:
        nodes: dict[str, int] = {}
        devices: dict[object, int] = {}

        def numbers(ranks: Sequence[RankShards]) -> tuple[Integers, Integers]:
            node = [nodes.setdefault(rank.location.node, len(nodes)) for rank in ranks]
            device = [devices.setdefault(rank.location, len(devices)) for rank in ranks]
            return np.array(node, dtype=np.int64), np.array(device, dtype=np.int64)

        return cls(*numbers(sources), *numbers(targets))

    def nearest(self, candidates: Integers, target: int) -> tuple[Integers, Link]:
        """Select the candidates that are nearest to the target, and their link."""
        for mine, theirs, link in (
            (self.target_device, self.source_device, Link.DEVICE),
            (self.target_node, self.source_node, Link.NODE),
        ):
            near = candidates[theirs[candidates] == mine[target]]
            if len(near):
                return near, link
        return candidates, Link.NETWORK


@dataclass(frozen=True, slots=True)
class _Choice:
    """Regions of a target, with several equally near sources that all of them could come from."""

    target: int
    group: int
    start: int
    stop: int
    near: Integers
    link: Link
    nbytes: int


class _Load:
    """Bytes that each source sends, and each node to others."""

    def __init__(self, locations: _Locations) -> None:
        self._node = locations.source_node
        self._rank_bytes = np.zeros(len(self._node), dtype=np.int64)
        self._node_bytes = np.zeros(self._node.max(initial=-1) + 1, dtype=np.int64)

    def add(self, source: int, link: Link, nbytes: int) -> None:
        self._rank_bytes[source] += nbytes
        if link is Link.NETWORK:
            self._node_bytes[self._node[source]] += nbytes

    def least(self, near: Integers, link: Link) -> int:
        if link is Link.NETWORK:
            node_bytes = self._node_bytes[self._node[near]]
            near = near[node_bytes == node_bytes.min()]
        return int(near[self._rank_bytes[near].argmin()])


_Ranges = list[tuple[int, int, int]]


def _assigned(
    locations: _Locations, offers: Offers, needs: list[TargetNeeds]
) -> dict[tuple[int, int], tuple[Link, _Ranges]]:
    """Assign regions to sources. For each source and target: their link, and ranges (group, start, stop) of the
    target's groups.
    """
    load = _Load(locations)
    assigned: dict[tuple[int, int], tuple[Link, _Ranges]] = {}

    def assign(choice: _Choice, source: int) -> None:
        load.add(source, choice.link, choice.nbytes)
        _, ranges = assigned.setdefault((source, choice.target), (choice.link, []))
        ranges.append((choice.group, choice.start, choice.stop))

    open_choices: list[_Choice] = []
    for target, need in enumerate(needs):
        for group, regions in need.groups.items():
            near, link = locations.nearest(offers.candidates[group], target)
            choice = _Choice(target, group, 0, len(regions), near, link, need.group_bytes(group))
            if len(near) == 1:
                assign(choice, int(near[0]))
            else:
                open_choices.append(choice)
    # The largest first, so that small ones even out what they leave.
    for choice in sorted(_shared(offers, needs, open_choices), key=lambda choice: -choice.nbytes):
        assign(choice, load.least(choice.near, choice.link))
    return assigned


def _shared(offers: Offers, needs: list[TargetNeeds], choices: list[_Choice]) -> Iterator[_Choice]:
    """The choices cut into shares, small enough that the sources can be loaded evenly."""
    totals: dict[int, int] = {}
    for choice in choices:
        totals[choice.group] = totals.get(choice.group, 0) + choice.nbytes
    for choice in choices:
        need = needs[choice.target]
        even = totals[choice.group] // (len(offers.candidates[choice.group]) * _SHARES_PER_SOURCE)
        count = max(1, choice.nbytes // max(even, _SMALLEST_SHARE))
        cuts = need.cuts(choice.group, count)
        for start, stop in pairwise(cuts):
            nbytes = need.group_bytes(choice.group, start, stop)
            yield _Choice(choice.target, choice.group, start, stop, choice.near, choice.link, nbytes)


def _segments(offers: Offers, need: TargetNeeds, source: int, ranges: _Ranges) -> tuple[Segments, int]:
    joined: _Ranges = []
    for group, start, stop in sorted(ranges):
        if joined and joined[-1][0] == group and joined[-1][2] == start:
            joined[-1] = (group, joined[-1][1], stop)
        else:
            joined.append((group, start, stop))
    segments = concatenated([need.segments(offers, group, start, stop, source) for group, start, stop in joined])
    return segments, sum(need.group_bytes(*entry) for entry in joined)
