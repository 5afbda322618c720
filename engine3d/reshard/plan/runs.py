"""From strided copies of any number of dimensions to as few pieces as memory allows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from engine3d.reshard.plan.pieces import Pieces

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Strided copies as columns, one entry a copy. The strides and sizes are [copies, dimensions]."""

    source_buffer: Integers
    source_offset: Integers
    source_strides: Integers
    target_buffer: Integers
    target_offset: Integers
    target_strides: Integers
    sizes: Integers


def as_pieces(copies: Copies) -> Pieces:
    """The copies as pieces, sorted by target buffer and offset.

    Dimensions that lie without a gap within one another on both sides become one. The innermost of what is left is a
    run if its stride is 1 on both sides (else every element is a run of its own), the next one its rows, and each
    index of those further out a piece. Then neighbouring pieces are merged.
    """
    sizes, source_strides, target_strides = _coalesced(copies)
    rows, length = sizes[:, 1], sizes[:, 0]
    index, source_offset, target_offset = _outer(copies, sizes[:, 2:], source_strides[:, 2:], target_strides[:, 2:])
    pieces = Pieces(
        source_buffer=copies.source_buffer[index],
        source_offset=source_offset,
        source_stride=source_strides[index, 1],
        target_buffer=copies.target_buffer[index],
        target_offset=target_offset,
        target_stride=target_strides[index, 1],
        rows=rows[index],
        length=length[index],
    )
    return _merged(sorted_pieces(pieces))


def sorted_pieces(pieces: Pieces) -> Pieces:
    return _take(pieces, np.lexsort((pieces.target_offset, pieces.target_buffer)))


def concatenated(parts: list[Pieces]) -> Pieces:
    """All pieces of several, sorted by target buffer and offset."""
    if len(parts) == 1:
        return parts[0]
    columns = {column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Pieces)}
    return sorted_pieces(Pieces(**columns))


def _coalesced(copies: Copies) -> tuple[Integers, Integers, Integers]:
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
    copies: Copies, sizes: Integers, source_strides: Integers, target_strides: Integers
) -> tuple[Integers, Integers, Integers]:
    """For every index of the outer dimensions: its copy, and where it starts in source and target."""
    counts = sizes.prod(axis=1)
    index = np.repeat(np.arange(len(counts)), counts)
    source_offset, target_offset = copies.source_offset[index], copies.target_offset[index]
    left = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    for size, source, target in zip(sizes.T, source_strides.T, target_strides.T, strict=True):
        left, digit = np.divmod(left, size[index])
        source_offset = source_offset + digit * source[index]
        target_offset = target_offset + digit * target[index]
    return index, source_offset, target_offset


def _merged(pieces: Pieces) -> Pieces:
    pieces = _normal(pieces)
    while True:
        before = len(pieces)
        if before > 1:
            pieces = _stacked(_side_by_side(pieces))
        if len(pieces) == before:
            return pieces


def _take(pieces: Pieces, index: Integers) -> Pieces:
    return Pieces(**{column.name: getattr(pieces, column.name)[index] for column in fields(Pieces)})


def _normal(pieces: Pieces) -> Pieces:
    """Rows without a gap between them are one row, and one row has its length as strides."""
    whole = (pieces.source_stride == pieces.length) & (pieces.target_stride == pieces.length) | (pieces.rows == 1)
    length = np.where(whole, pieces.rows * pieces.length, pieces.length)
    return replace(
        pieces,
        rows=np.where(whole, 1, pieces.rows),
        length=length,
        source_stride=np.where(whole, length, pieces.source_stride),
        target_stride=np.where(whole, length, pieces.target_stride),
    )


def _neighbours(pieces: Pieces, *columns: str) -> NDArray[np.bool_]:
    """For each piece but the last, whether it and the next agree in the buffers and these columns."""
    same = np.ones(len(pieces) - 1, dtype=np.bool_)
    for name in ("source_buffer", "target_buffer", *columns):
        column = getattr(pieces, name)
        same &= column[1:] == column[:-1]
    return same


def _side_by_side(pieces: Pieces) -> Pieces:
    """Pieces whose rows continue one another in source and target, as one with longer rows."""
    one_row = pieces.rows[1:] == 1
    joined = _neighbours(pieces, "rows") & (one_row | _neighbours(pieces, "source_stride", "target_stride"))
    joined &= pieces.source_offset[1:] == pieces.source_offset[:-1] + pieces.length[:-1]
    joined &= pieces.target_offset[1:] == pieces.target_offset[:-1] + pieces.length[:-1]
    if not joined.any():
        return pieces
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return _normal(replace(_take(pieces, first), length=np.add.reduceat(pieces.length, first)))


def _stacked(pieces: Pieces) -> Pieces:
    """Pieces of one row length, one below the other at one distance in source and target, as one with more rows."""
    if len(pieces) == 1:
        return pieces
    source_gap, target_gap = (
        offset[1:] - offset[:-1] - (pieces.rows[:-1] - 1) * stride[:-1]
        for offset, stride in (
            (pieces.source_offset, pieces.source_stride),
            (pieces.target_offset, pieces.target_stride),
        )
    )
    # Rows go upwards on both sides: no tensor has a negative stride.
    joined = _neighbours(pieces, "length") & (source_gap >= pieces.length[1:]) & (target_gap >= pieces.length[1:])
    for side in (slice(None, -1), slice(1, None)):
        fits = (pieces.source_stride[side] == source_gap) & (pieces.target_stride[side] == target_gap)
        joined &= (pieces.rows[side] == 1) | fits
    joined = _without_shared(joined, source_gap, target_gap)
    if not joined.any():
        return pieces
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    several = np.concatenate([joined, [False]])[first]
    stacked = _take(pieces, first)
    return _normal(
        replace(
            stacked,
            rows=np.add.reduceat(pieces.rows, first),
            source_stride=np.where(several, np.append(source_gap, 0)[first], stacked.source_stride),
            target_stride=np.where(several, np.append(target_gap, 0)[first], stacked.target_stride),
        )
    )


def _without_shared(joined: NDArray[np.bool_], source_gap: Integers, target_gap: Integers) -> NDArray[np.bool_]:
    """The links of `joined` that remain when a piece between two links of different distance stays with the first.

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
    # A stretch that follows nothing is whole; one that follows a longer one loses its first link; between such, in
    # runs of stretches of one link, every other is lost.
    certain = ~follows | np.concatenate([[True], lengths[:-1] > 1])
    position = np.arange(len(start))
    last_certain = np.maximum.accumulate(np.where(certain, position, 0))
    broken = follows[last_certain] ^ ((position - last_certain) % 2 == 1)
    remaining = joined.copy()
    remaining[links[start[broken]]] = False
    return remaining
