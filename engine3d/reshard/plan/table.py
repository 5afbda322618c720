"""Holdings of many ranks as columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine3d.errors import EngineError, UserError
from engine3d.models.rules import Box
from engine3d.reshard.describe.shards import Holding, RankShards
from engine3d.reshard.plan.runs import Integers

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class HoldingColumns:
    """Holdings as columns, one entry a holding; start, stop and strides are [holdings, dimensions].

    Tensors with fewer dimensions have further ones of size 1 and stride 0.
    """

    tensor: Integers
    start: Integers
    stop: Integers
    buffer: Integers
    offset: Integers
    strides: Integers

    @property
    def elements(self) -> Integers:
        return (self.stop - self.start).prod(axis=1)

    def take(self, index: Integers) -> HoldingColumns:
        """Some of the rows."""
        return HoldingColumns(
            self.tensor[index],
            self.start[index],
            self.stop[index],
            self.buffer[index],
            self.offset[index],
            self.strides[index],
        )


class HoldingTable:
    """Distinct holdings as rows of one set of columns.

    Copies of a dense layer, or the ranks of several engines, hold the same: only what is distinct is worked on. Equal
    rows are equal boxes of a tensor at equal offsets in memory.
    """

    def __init__(self, tensors: dict[str, int], shapes: Shapes) -> None:
        self._tensors = tensors
        self._shapes = shapes
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[Holding, int] = {}

    def rows(self, rank: RankShards) -> Integers:
        """The rows of a rank's holdings, without those of tensors that have no number."""
        known = list(map(self._by_identity.get, map(id, rank.holdings)))
        if None in known:
            known = [
                self._row(rank, holding) if row is None else row
                for row, holding in zip(known, rank.holdings, strict=True)
            ]
        rows = np.array(known, dtype=np.int64)
        return rows[rows >= 0]

    def _row(self, rank: RankShards, holding: Holding) -> int:
        if holding.tensor not in self._tensors:
            row = -1
        else:
            if not len(holding.box) == len(holding.strides) == len(self._shapes[holding.tensor]):
                raise _outside(rank, holding, self._shapes)
            row = self._by_value.setdefault(holding, len(self._by_value))
        self._by_identity[id(holding)] = row
        return row

    @property
    def holdings(self) -> list[Holding]:
        return list(self._by_value)

    def columns(self, ranks: Sequence[RankShards], rows: Sequence[Integers]) -> HoldingColumns:
        """All rows as columns, after a check that they lie within their tensors and their ranks' memory."""
        holdings, dimensions = self.holdings, max(map(len, (self._shapes[name] for name in self._tensors)), default=1)
        more = [((0, 1),) * count for count in range(dimensions + 1)]
        spans = chain.from_iterable((*holding.box, *more[dimensions - len(holding.box)]) for holding in holdings)
        box = np.fromiter(chain.from_iterable(spans), dtype=np.int64).reshape(len(holdings), dimensions, 2)
        none = [(0,) * count for count in range(dimensions + 1)]
        strides = chain.from_iterable(
            (*holding.strides, *none[dimensions - len(holding.strides)]) for holding in holdings
        )
        columns = HoldingColumns(
            tensor=np.array([self._tensors[holding.tensor] for holding in holdings], dtype=np.int64),
            start=np.ascontiguousarray(box[:, :, 0]),
            stop=np.ascontiguousarray(box[:, :, 1]),
            buffer=np.array([holding.buffer for holding in holdings], dtype=np.int64),
            offset=np.array([holding.offset for holding in holdings], dtype=np.int64),
            strides=np.fromiter(strides, dtype=np.int64).reshape(len(holdings), dimensions),
        )
        sizes = np.ones((len(self._tensors), dimensions), dtype=np.int64)
        for number, name in enumerate(self._tensors):
            sizes[number, : len(self._shapes[name])] = self._shapes[name]
        within = (columns.start >= 0) & (columns.start < columns.stop)
        within &= columns.stop <= sizes[columns.tensor]
        outside = np.asarray((~within).any(axis=1))
        end = columns.offset + ((columns.stop - columns.start - 1) * columns.strides).sum(axis=1)
        # Memory is read and written upwards from a holding's offset.
        end[(columns.offset < 0) | (columns.strides < 0).any(axis=1)] = np.iinfo(np.int64).max
        for rank, rank_rows in zip(ranks, rows, strict=True):
            if outside[rank_rows].any():
                raise _outside(rank, holdings[rank_rows[outside[rank_rows].argmax()]], self._shapes)
            _check_memory(rank, holdings, rank_rows, columns.buffer[rank_rows], end[rank_rows])
        return columns


def box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _outside(rank: RankShards, holding: Holding, shapes: Shapes) -> UserError:
    return UserError(
        f"reshard: {rank.name} holds {box_text(holding.box)} of {holding.tensor}, "
        f"which does not lie within its shape {list(shapes[holding.tensor])}"
    )


def _check_memory(rank: RankShards, holdings: list[Holding], rows: Integers, buffer: Integers, end: Integers) -> None:
    """Refuse holdings whose last element, `end`, is not in the buffer."""
    elements = np.array([memory.elements for memory in rank.buffers], dtype=np.int64)
    known = (buffer >= 0) & (buffer < len(elements))
    fits = end < np.append(elements, 0)[np.where(known, buffer, -1)]
    if not fits.all():
        holding = holdings[rows[fits.argmin()]]
        name = rank.buffers[holding.buffer].name if 0 <= holding.buffer < len(elements) else holding.buffer
        raise EngineError(f"reshard: {rank.name}: {holding.tensor} reaches outside its buffer {name}")
