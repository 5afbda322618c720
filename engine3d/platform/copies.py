"""Many copies between tensors, as columns, and the tables and views that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine3d.startup.lazy_imports import torch

Column = NDArray[np.int64]

CopyMethod = Literal["mixed", "engines"]
"""Copy method of a GPU: copy engines for long runs and one kernel for the rest, or copy engines for everything."""

RunCopies = Callable[[], None]
"""Enqueues all copies on the device's current stream."""

WORDS = (16, 8, 4, 2, 1)
"""Bytes that a thread copies at once."""

TILE_COLUMNS = 6
"""Source address, target address, source stride, target stride, rows, width; the last four in words."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies as columns, one entry each: `rows` runs of `length` neighbouring elements. All in elements.

    Run r starts at element source_offset + r * source_stride of its source, and likewise of its target. Values are cast
    where the dtypes differ. No two copies write the same memory, and the order in which they run is free.

    Args:
        sources, targets: flat tensors with stride 1.
        route: the route of each copy. Copies of different routes are interleaved.
        source, target: index of the tensor.
        near_routes: routes whose targets lie on the copying device itself.
    """

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    route: Column
    source: Column
    source_offset: Column
    source_stride: Column
    target: Column
    target_offset: Column
    target_stride: Column
    rows: Column
    length: Column
    near_routes: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: NDArray[np.bool_] | Column) -> Copies:
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def near(self) -> NDArray[np.bool_]:
        """Mask of the copies that stay on the copying device."""
        return np.isin(self.route, list(self.near_routes))

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return int((self.rows * self.length * self.itemsizes()).sum())

    def itemsizes(self) -> Column:
        """Bytes of an element of each copy's target."""
        return _column(self.targets, _itemsize)[self.target]

    def simplified(self) -> Copies:
        """The same copies, without empty ones and with rows that are neighbours on both sides joined.

        Raises:
            ValueError: a copy reaches out of its tensors, which nothing later would notice.
        """
        copies = self[(self.rows > 0) & (self.length > 0)]
        for tensors, index, offset, stride in (
            (copies.sources, copies.source, copies.source_offset, copies.source_stride),
            (copies.targets, copies.target, copies.target_offset, copies.target_stride),
        ):
            last = offset + (copies.rows - 1) * stride + copies.length
            if (offset < 0).any() or (last > _column(tensors, lambda tensor: tensor.numel())[index]).any():
                raise ValueError("a copy reaches out of its source or target")
        joined = (copies.source_stride == copies.length) & (copies.target_stride == copies.length)
        length = np.where(joined, copies.rows * copies.length, copies.length)
        rows = np.where(joined, 1, copies.rows)
        return Copies(
            copies.sources,
            copies.targets,
            copies.route,
            copies.source,
            copies.source_offset,
            np.where(rows == 1, length, copies.source_stride),
            copies.target,
            copies.target_offset,
            np.where(rows == 1, length, copies.target_stride),
            rows,
            length,
            self.near_routes,
        )

    def interleaved(self) -> Copies:
        """The same copies, in an order in which all routes advance together and end together."""
        return self[_interleave(self.route, self.rows * self.length)]

    def casts(self) -> NDArray[np.bool_]:
        """Mask of the copies that change the dtype."""
        dtypes = sorted({tensor.dtype for tensor in (*self.sources, *self.targets)}, key=str)
        source, target = (_column(tensors, lambda t: dtypes.index(t.dtype)) for tensors in (self.sources, self.targets))
        return source[self.source] != target[self.target]

    def views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The target and the source of each copy, as views of one shape."""
        lists = [column.tolist() for column in (self.rows, self.length)]
        targets = _views(self.targets, self.target, self.target_offset, self.target_stride, *lists)
        sources = _views(self.sources, self.source, self.source_offset, self.source_stride, *lists)
        return targets, sources

    def tiles(self, tile_bytes: int) -> dict[int, Column]:
        """Tables of tiles of about equal size, for each word of WORDS that addresses, strides and lengths allow.

        Of copies that do not cast. A tile is at most `tile_bytes`, a multiple of 16; the tiles of different routes are
        interleaved.

        Returns:
            word -> [tiles, TILE_COLUMNS] int64.
        """
        itemsize = _column(self.sources, _itemsize)[self.source]
        source = _column(self.sources, torch.Tensor.data_ptr)[self.source] + self.source_offset * itemsize
        target = _column(self.targets, torch.Tensor.data_ptr)[self.target] + self.target_offset * itemsize
        width = self.length * itemsize
        source_stride, target_stride = self.source_stride * itemsize, self.target_stride * itemsize
        # The strides of a single row are its length.
        bits = source | target | width | source_stride | target_stride | WORDS[0]
        word = bits & -bits
        tables = {}
        for size in WORDS:
            which = word == size
            if which.any():
                table = np.stack([source, target, source_stride, target_stride, self.rows, width], axis=1)[which]
                tables[size] = _cut(table, self.route[which], size, tile_bytes)
        return tables


_COLUMNS = (
    "route",
    "source",
    "source_offset",
    "source_stride",
    "target",
    "target_offset",
    "target_stride",
    "rows",
    "length",
)


def _itemsize(tensor: torch.Tensor) -> int:
    return tensor.dtype.itemsize


def _column(tensors: Sequence[torch.Tensor], measure: Callable[[torch.Tensor], int]) -> Column:
    return np.array([measure(tensor) for tensor in tensors], dtype=np.int64)


def _views(
    tensors: Sequence[torch.Tensor], index: Column, offset: Column, stride: Column, rows: list[int], length: list[int]
) -> list[torch.Tensor]:
    bases = [tensor.detach() for tensor in tensors]
    start = (_column(bases, lambda base: int(base.storage_offset()))[index] + offset).tolist()
    return [
        bases[i].as_strided((c,), (1,), o) if r == 1 else bases[i].as_strided((r, c), (s, 1), o)
        for i, o, s, r, c in zip(index.tolist(), start, stride.tolist(), rows, length, strict=True)
    ]


def _interleave(route: Column, size: Column) -> Column:
    """The order of entries by how much of their route lies before their middle."""
    by_route = np.argsort(route, kind="stable")
    sizes = size[by_route].astype(np.float64)
    _, first, which = np.unique(route[by_route], return_index=True, return_inverse=True)
    total = np.add.reduceat(sizes, first) if len(first) else sizes
    before = np.concatenate([[0.0], np.cumsum(total)[:-1]]) if len(first) else sizes
    middle = np.cumsum(sizes) - sizes / 2 - before[which]
    return by_route[np.argsort(middle / total[which], kind="stable")]


def _cut(table: Column, route: Column, word: int, tile_bytes: int) -> Column:
    """Cut rectangles of bytes into tiles: long rows into segments, short rows into groups."""
    source, target, source_stride, target_stride, rows, width = table.T
    tile_width = np.minimum(width, tile_bytes)
    tile_rows = np.maximum(1, tile_bytes // width)
    across = -(-width // tile_width)
    count = -(-rows // tile_rows) * across
    of = np.repeat(np.arange(len(table)), count)
    number = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    row = number // across[of] * tile_rows[of]
    column = number % across[of] * tile_width[of]
    cut_rows = np.minimum(tile_rows[of], rows[of] - row)
    cut_width = np.minimum(tile_width[of], width[of] - column)
    tiles = np.stack(
        [
            source[of] + row * source_stride[of] + column,
            target[of] + row * target_stride[of] + column,
            source_stride[of] // word,
            target_stride[of] // word,
            cut_rows,
            cut_width // word,
        ],
        axis=1,
    )
    return np.ascontiguousarray(tiles[_interleave(route[of], cut_rows * cut_width)])
