"""Conversion of strided copies of any number of dimensions to as few segments as memory allows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from engine3d.reshard.plan.transfers import Segments

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StridedCopies:
    """Strided copies as columns, one entry a copy. The strides and sizes are [copies, dimensions]."""

    source_buffer: Integers
    source_offset: Integers
    source_strides: Integers
    target_buffer: Integers
    target_offset: Integers
    target_strides: Integers
    sizes: Integers


def as_segments(copies: StridedCopies) -> Segments:
    """The copies as segments, sorted by target buffer and offset.

    Dimensions that lie without a gap within one another on both sides become one. The innermost of what is left is a
    run if its stride is 1 on both sides (else every element is a run of its own), the next one its rows, and each
    index of those further out a segment. Then neighbouring segments are merged.
    """
    sizes, source_strides, target_strides = _coalesced(copies)
    rows, length = sizes[:, 1], sizes[:, 0]
    index, source_offset, target_offset = _outer(copies, sizes[:, 2:], source_strides[:, 2:], target_strides[:, 2:])
    segments = Segments(
        source_buffer=copies.source_buffer[index],
        source_offset=source_offset,
        source_stride=source_strides[index, 1],
        target_buffer=copies.target_buffer[index],
        target_offset=target_offset,
        target_stride=target_strides[index, 1],
        rows=rows[index],
        length=length[index],
    )
    return _merged(sorted_segments(segments))


def sorted_segments(segments: Segments) -> Segments:
    return _take(segments, np.lexsort((segments.target_offset, segments.target_buffer)))


def concatenated(several: list[Segments]) -> Segments:
    """All segments of several, sorted by target buffer and offset."""
    if len(several) == 1:
        return several[0]
    columns = {
        column.name: np.concatenate([getattr(segments, column.name) for segments in several])
        for column in fields(Segments)
    }
    return sorted_segments(Segments(**columns))


def _coalesced(copies: StridedCopies) -> tuple[Integers, Integers, Integers]:
    """Sizes, source and target strides, [copies, dimensions + 2], innermost first: the run, its rows, what is left."""
    count, dimensions = copies.sizes.shape
    order = np.argsort(
        np.where(copies.sizes == 1, np.iinfo(np.int64).max, copies.target_strides), axis=1, kind="stable"
    )
    given = [
        np.take_along_axis(column, order, axis=1)
        for column in (copies.sizes, copies.source_strides, copies.target_strides)
    ]
    sizes, source_strides, target_strides = (np.ones((count, dimensions + 2), dtype=np.int64) for _ in range(3))
    copy, top = np.arange(count), np.zeros(count, dtype=np.int64)
    for size, source, target in zip(*(column.T for column in given), strict=True):
        inner = sizes[copy, top]
        fits = (source == inner * source_strides[copy, top]) & (target == inner * target_strides[copy, top])
        fits |= size == 1
        sizes[copy, top] *= np.where(fits, size, 1)
        new = np.flatnonzero(~fits)
        top[new] += 1
        sizes[new, top[new]] = size[new]
        source_strides[new, top[new]] = source[new]
        target_strides[new, top[new]] = target[new]
    return sizes, source_strides, target_strides


def _outer(
    copies: StridedCopies, sizes: Integers, source_strides: Integers, target_strides: Integers
) -> tuple[Integers, Integers, Integers]:
    """List every index of the outer dimensions: its copy, and its offsets in source and target."""
    counts = sizes.prod(axis=1)
    index = np.repeat(np.arange(len(counts)), counts)
    source_offset, target_offset = copies.source_offset[index], copies.target_offset[index]
    left = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    for size, source, target in zip(sizes.T, source_strides.T, target_strides.T, strict=True):
        left, digit = np.divmod(left, size[index])
        source_offset = source_offset + digit * source[index]
        target_offset = target_offset + digit * target[index]
    return index, source_offset, target_offset


def _merged(segments: Segments) -> Segments:
    segments = _normal(segments)
    while True:
        before = len(segments)
        if before > 1:
            segments = _stacked(_side_by_side(segments))
        if len(segments) == before:
            return segments


def _take(segments: Segments, index: Integers) -> Segments:
    return Segments(**{column.name: getattr(segments, column.name)[index] for column in fields(Segments)})


def _normal(segments: Segments) -> Segments:
    """Rows without a gap between them are one row, and one row has its length as strides."""
    gapless = (segments.source_stride == segments.length) & (segments.target_stride == segments.length) | (
        segments.rows == 1
    )
    length = np.where(gapless, segments.rows * segments.length, segments.length)
    return replace(
        segments,
        rows=np.where(gapless, 1, segments.rows),
        length=length,
        source_stride=np.where(gapless, length, segments.source_stride),
        target_stride=np.where(gapless, length, segments.target_stride),
    )


def _neighbours(segments: Segments, *columns: str) -> NDArray[np.bool_]:
    """True for each segment but the last that agrees with the next in the buffers and these columns."""
    same = np.ones(len(segments) - 1, dtype=np.bool_)
    for name in ("source_buffer", "target_buffer", *columns):
        column = getattr(segments, name)
        same &= column[1:] == column[:-1]
    return same


def _side_by_side(segments: Segments) -> Segments:
    """Segments whose rows continue one another in source and target, as one with longer rows."""
    one_row = segments.rows[1:] == 1
    joined = _neighbours(segments, "rows") & (one_row | _neighbours(segments, "source_stride", "target_stride"))
    joined &= segments.source_offset[1:] == segments.source_offset[:-1] + segments.length[:-1]
    joined &= segments.target_offset[1:] == segments.target_offset[:-1] + segments.length[:-1]
    if not joined.any():
        return segments
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return _normal(replace(_take(segments, first), length=np.add.reduceat(segments.length, first)))


def _stacked(segments: Segments) -> Segments:
    """Segments of one row length, one below the other at one distance in source and target, as one with more rows."""
    if len(segments) == 1:
        return segments
    source_gap, target_gap = (
        offset[1:] - offset[:-1] - (segments.rows[:-1] - 1) * stride[:-1]
        for offset, stride in (
            (segments.source_offset, segments.source_stride),
            (segments.target_offset, segments.target_stride),
        )
    )
    # Rows go upwards on both sides: no tensor has a negative stride.
    joined = _neighbours(segments, "length") & (source_gap >= segments.length[1:]) & (target_gap >= segments.length[1:])
    for side in (slice(None, -1), slice(1, None)):
        fits = (segments.source_stride[side] == source_gap) & (segments.target_stride[side] == target_gap)
        joined &= (segments.rows[side] == 1) | fits
    joined = _without_shared(joined, source_gap, target_gap)
    if not joined.any():
        return segments
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    several = np.concatenate([joined, [False]])[first]
    stacked = _take(segments, first)
    return _normal(
        replace(
            stacked,
            rows=np.add.reduceat(segments.rows, first),
            source_stride=np.where(several, np.append(source_gap, 0)[first], stacked.source_stride),
            target_stride=np.where(several, np.append(target_gap, 0)[first], stacked.target_stride),
        )
    )


def _without_shared(joined: NDArray[np.bool_], source_gap: Integers, target_gap: Integers) -> NDArray[np.bool_]:
    """The links of `joined` that remain when a segment between two links of different distance stays with the first.

    Links of one distance in a row are a stretch. Where a stretch follows another at once, its first link is broken,
    unless nothing was left of the other.
    """
    links = np.flatnonzero(joined)
    if len(links) < 2:
        return joined
    same = (source_gap[links][1:] == source_gap[links][:-1]) & (target_gap[links][1:] == target_gap[links][:-1])
    adjacent = links[1:] == links[:-1] + 1
    start = np.flatnonzero(np.concatenate([[True], ~(same & adjacent)]))
    lengths = np.diff(np.append(start, len(links)))
    follows = np.concatenate([[False], adjacent])[start]
    # A stretch that follows nothing is complete; one that follows a longer one loses its first link; between such, in
    # runs of stretches of one link, every other is lost.
    certain = ~follows | np.concatenate([[True], lengths[:-1] > 1])
    position = np.arange(len(start))
    last_certain = np.maximum.accumulate(np.where(certain, position, 0))
    broken = follows[last_certain] ^ ((position - last_certain) % 2 == 1)
    remaining = joined.copy()
    remaining[links[start[broken]]] = False
    return remaining
