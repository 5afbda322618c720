"""Intersections of what sources offer with what targets need, as columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine3d.errors import EngineError, UserError
from engine3d.models.rules import Box
from engine3d.reshard.describe.shards import RankShards
from engine3d.reshard.plan.runs import Integers, StridedCopies, as_segments
from engine3d.reshard.plan.table import HoldingColumns, HoldingTable, Shapes, box_text
from engine3d.reshard.plan.transfers import Segments


@dataclass(frozen=True)
class Offers:
    """Distinct boxes that sources hold, and their position in each source.

    Args:
        tensors: number of each tensor that targets need.
        table: holdings of the sources.
        box_row: a row of the table for each box; boxes are sorted by tensor.
        first_box: [tensors + 1], where each tensor's boxes begin.
        holder_row: the table's row, one entry a box and a source that holds it, sorted by box, then source.
        first_holder: [boxes + 1], where each box's holders begin.
        groups: number of the set of sources that hold the box, one a box.
        candidates: the sources of each group, ascending.
    """

    tensors: dict[str, int]
    table: HoldingColumns
    box_row: Integers
    first_box: Integers
    holder_row: Integers
    first_holder: Integers
    groups: Integers
    candidates: tuple[Integers, ...]

    @cached_property
    def layouts(self) -> tuple[dict[int, int], ...]:
        """Number of each source's memory layout, by group. Sources with equal numbers have equal offsets in memory."""
        order = np.argsort(self.groups, kind="stable")
        bounds = np.searchsorted(self.groups[order], np.arange(len(self.candidates) + 1))
        by_group = []
        for group, sources in enumerate(self.candidates):
            first = self.first_holder[order[bounds[group] : bounds[group + 1]]]
            seen: dict[bytes, int] = {}
            layouts = [self.holder_row[first + position].tobytes() for position in range(len(sources))]
            numbers = [seen.setdefault(layout, len(seen)) for layout in layouts]
            by_group.append(dict(zip(sources.tolist(), numbers, strict=True)))
        return tuple(by_group)


def offers_of(sources: Sequence[RankShards], targets: Sequence[RankShards], shapes: Shapes) -> Offers:
    """Collect what the sources hold of the tensors that the targets need."""
    tensors = _needed_tensors(targets, shapes)
    collected = HoldingTable(tensors, shapes)
    rows = [collected.rows(source) for source in sources]
    table = collected.columns(sources, rows)
    # Boxes are numbered by tensor, then as they come.
    numbers: dict[tuple[str, Box], int] = {}
    named = [numbers.setdefault((holding.tensor, holding.box), len(numbers)) for holding in collected.holdings]
    box_of_row = np.array(named, dtype=np.int64)
    box_row = np.zeros(len(numbers), dtype=np.int64)
    box_row[box_of_row[::-1]] = np.arange(len(named))[::-1]
    by_tensor = np.argsort(table.tensor[box_row], kind="stable")
    box_row = box_row[by_tensor]
    sorted_position = np.empty_like(by_tensor)
    sorted_position[by_tensor] = np.arange(len(by_tensor))
    first_box = np.searchsorted(table.tensor[box_row], np.arange(len(tensors) + 1))
    _check_disjoint(table.take(box_row), first_box, list(tensors))

    holder_row = np.concatenate([*rows, _NONE])
    source = np.repeat(np.arange(len(rows)), [len(rank_rows) for rank_rows in rows])
    # A source that has a box twice offers the first.
    key, first = np.unique(sorted_position[box_of_row[holder_row]] * max(1, len(rows)) + source, return_index=True)
    box, source = np.divmod(key, max(1, len(rows)))
    first_holder = np.searchsorted(box, np.arange(len(box_row) + 1))
    groups, candidates = _groups(source, first_holder)
    return Offers(tensors, table, box_row, first_box, holder_row[first], first_holder, groups, candidates)


@dataclass(frozen=True)
class TargetNeeds:
    """Regions that one target needs, or several equal ones. A region is the intersection of a holding with an offered
    box.

    Args:
        box: the offered box, one entry a region. Regions are sorted by target buffer and offset.
        start: [regions, dimensions], the first element in the HuggingFace tensor.
        sizes: [regions, dimensions].
        buffer: the target's.
        offset: of the first element in it.
        strides: [regions, dimensions], in it.
        region_bytes: of the target's dtype.
        nbytes: of all regions.
        nbytes_aliased: of the holdings in aliased buffers, which are in no region.
        groups: for each group of boxes, its regions.
        _segments: cache, shared by targets that differ in their aliases alone.
    """

    box: Integers
    start: Integers
    sizes: Integers
    buffer: Integers
    offset: Integers
    strides: Integers
    region_bytes: Integers
    nbytes: int
    nbytes_aliased: int
    groups: dict[int, Integers]
    _segments: dict[tuple[int, int, bytes], Segments] = field(default_factory=dict)

    def group_bytes(self, group: int, start: int = 0, stop: int | None = None) -> int:
        """Count the bytes of a group's regions from start to stop."""
        return int(self.region_bytes[self.groups[group][start:stop]].sum())

    def cuts(self, group: int, count: int) -> list[int]:
        """Cut a group's regions into at most `count` shares of about as many bytes, first and last end included.

        Between two buffers where one ends near enough: the regions of a buffer merge best when they have one source.
        """
        regions = self.groups[group]
        upto = np.concatenate([[0], np.cumsum(self.region_bytes[regions])])
        even = upto[-1] * np.arange(1, count) // count
        buffer_ends = np.flatnonzero(np.diff(self.buffer[regions], prepend=-1, append=-1))
        at_region, at_buffer = _closest(upto, even), buffer_ends[_closest(upto[buffer_ends], even)]
        near = 2 * np.abs(upto[at_buffer] - even) * count <= upto[-1]
        return sorted({0, len(regions), *np.where(near, at_buffer, at_region).tolist()})

    def segments(self, offers: Offers, group: int, start: int, stop: int, source: int) -> Segments:
        """Convert the group's regions from start to stop to segments from one source to the target."""
        regions = self.groups[group][start:stop]
        key = group, offers.layouts[group][source], regions.tobytes()
        if key not in self._segments:
            position = int(np.searchsorted(offers.candidates[group], source))
            row = offers.holder_row[offers.first_holder[self.box[regions]] + position]
            offered = offers.table
            strides = offered.strides[row]
            copies = StridedCopies(
                source_buffer=offered.buffer[row],
                source_offset=offered.offset[row] + ((self.start[regions] - offered.start[row]) * strides).sum(axis=1),
                source_strides=strides,
                target_buffer=self.buffer[regions],
                target_offset=self.offset[regions],
                target_strides=self.strides[regions],
                sizes=self.sizes[regions],
            )
            self._segments[key] = as_segments(copies)
        return self._segments[key]


def needs_of(targets: Sequence[RankShards], offers: Offers, shapes: Shapes) -> list[TargetNeeds]:
    """Work out what each target needs. Targets with equal buffers and holdings share one result."""
    by_identity: dict[tuple[int, int], int] = {}
    by_value: dict[tuple[object, object], int] = {}
    distinct: list[RankShards] = []
    numbers = []
    for target in targets:
        identity = id(target.buffers), id(target.holdings)
        if identity not in by_identity:
            by_identity[identity] = by_value.setdefault((target.buffers, target.holdings), len(distinct))
            if by_identity[identity] == len(distinct):
                distinct.append(target)
        numbers.append(by_identity[identity])
    collected = HoldingTable(offers.tensors, shapes)
    rows = [collected.rows(target) for target in distinct]
    table = collected.columns(distinct, rows)
    complete = [
        _needs(target, table.take(rank_rows), offers, shapes) for target, rank_rows in zip(distinct, rows, strict=True)
    ]
    by_key: dict[tuple[int, frozenset[int]], TargetNeeds] = {}
    needs = []
    for number, target in zip(numbers, targets, strict=True):
        key = number, frozenset(alias.target_buffer for alias in target.aliases)
        if key not in by_key:
            by_key[key] = _without(complete[number], key[1], offers)
        needs.append(by_key[key])
    return needs


_NONE = np.zeros(0, dtype=np.int64)


def _needed_tensors(targets: Sequence[RankShards], shapes: Shapes) -> dict[str, int]:
    """Every tensor that a target needs, numbered in the order of the model."""
    names: set[str] = set()
    for holdings in {id(target.holdings): target.holdings for target in targets}.values():
        names.update(holding.tensor for holding in holdings)
    unknown = min(names - shapes.keys(), default=None)
    if unknown is not None:
        target = next(target for target in targets if any(holding.tensor == unknown for holding in target.holdings))
        raise UserError(f"reshard: {target.name} needs {unknown}, which is not a tensor of the model")
    return {name: number for number, name in enumerate(name for name in shapes if name in names)}


def _check_disjoint(boxes: HoldingColumns, first_box: Integers, names: list[str]) -> None:
    """Refuse distinct boxes of one tensor that share elements."""
    for tensor in np.flatnonzero(np.diff(first_box) > 1).tolist():
        begin, end = int(first_box[tensor]), int(first_box[tensor + 1])
        start, stop = boxes.start[begin:end], boxes.stop[begin:end]
        for index in range(end - begin - 1):
            shared = ((start[index] < stop[index + 1 :]) & (start[index + 1 :] < stop[index])).all(axis=1)
            if shared.any():
                pair = (index, index + 1 + int(shared.argmax()))
                one, other = (box_text(tuple(zip(start[at].tolist(), stop[at].tolist(), strict=True))) for at in pair)
                raise EngineError(f"reshard: sources hold boxes of {names[tensor]} that overlap: {one} and {other}")


def _groups(source: Integers, first_holder: Integers) -> tuple[Integers, tuple[Integers, ...]]:
    numbers: dict[bytes, int] = {}
    candidates: list[Integers] = []
    groups = np.empty(len(first_holder) - 1, dtype=np.int64)
    bounds = first_holder.tolist()
    for box, (start, stop) in enumerate(pairwise(bounds)):
        sources = source[start:stop]
        group = numbers.setdefault(sources.tobytes(), len(candidates))
        if group == len(candidates):
            candidates.append(sources)
        groups[box] = group
    return groups, tuple(candidates)


def _needs(target: RankShards, columns: HoldingColumns, offers: Offers, shapes: Shapes) -> TargetNeeds:
    counts = np.diff(offers.first_box)[columns.tensor]
    holding = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(holding)) - np.repeat(np.cumsum(counts) - counts, counts)
    box = offers.first_box[columns.tensor][holding] + within
    offered = offers.box_row[box]
    start = np.maximum(columns.start[holding], offers.table.start[offered])
    stop = np.minimum(columns.stop[holding], offers.table.stop[offered])
    meet = (start < stop).all(axis=1)
    holding, box, start, sizes = holding[meet], box[meet], start[meet], (stop - start)[meet]
    elements = sizes.prod(axis=1)
    _check_covered(target, columns, holding, elements, counts, shapes)
    buffer, strides = columns.buffer[holding], columns.strides[holding]
    offset = columns.offset[holding] + ((start - columns.start[holding]) * strides).sum(axis=1)
    itemsize = np.array([target_buffer.itemsize for target_buffer in target.buffers], dtype=np.int64)
    order = np.lexsort((offset, buffer))
    region_bytes = elements * itemsize[buffer] if len(buffer) else elements
    return TargetNeeds(
        box=box[order],
        start=start[order],
        sizes=sizes[order],
        buffer=buffer[order],
        offset=offset[order],
        strides=strides[order],
        region_bytes=region_bytes[order],
        nbytes=int(region_bytes.sum()),
        nbytes_aliased=0,
        groups={},
    )


def _check_covered(
    target: RankShards, columns: HoldingColumns, holding: Integers, elements: Integers, counts: Integers, shapes: Shapes
) -> None:
    covered = np.zeros(len(columns.tensor), dtype=np.int64)
    np.add.at(covered, holding, elements)
    missing = columns.elements - covered
    if missing.any():
        index = int((missing != 0).argmax())
        uncovered = target.holdings[index]
        what = f"{box_text(uncovered.box)} of {uncovered.tensor}, which has shape {list(shapes[uncovered.tensor])}"
        lack = f"{missing[index]} of these elements" if counts[index] else "the tensor"
        raise UserError(f"reshard: {target.name} needs {what}, and no source holds {lack}")


def _without(needs: TargetNeeds, aliased: frozenset[int], offers: Offers) -> TargetNeeds:
    """Drop the needs of aliased buffers, and group the others."""
    bound = np.zeros(needs.buffer.max(initial=-1) + 1, dtype=np.bool_)
    bound[[buffer for buffer in aliased if buffer < len(bound)]] = True
    free = ~bound[needs.buffer]
    regions = np.flatnonzero(free)
    group_of = offers.groups[needs.box[regions]] if len(regions) else regions
    order = np.argsort(group_of, kind="stable")
    groups, first = np.unique(group_of[order], return_index=True)
    nbytes = int(needs.region_bytes[regions].sum())
    split = np.split(regions[order], first[1:]) if len(regions) else []
    return replace(
        needs,
        nbytes=nbytes,
        nbytes_aliased=needs.nbytes - nbytes,
        groups=dict(zip(groups.tolist(), split, strict=True)),
    )


def _closest(ascending: Integers, values: Integers) -> NDArray[np.int64]:
    """Index of the entry closest to each wanted value."""
    after = np.clip(np.searchsorted(ascending, values), 1, len(ascending) - 1)
    return after - (values - ascending[after - 1] < ascending[after] - values)
