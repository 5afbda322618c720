"""Grid of a tensor's elements, cut at the edges of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from engine3d.models.rules import Box


class CellGrid:
    """A tensor's elements, in cells that no box cuts, each with a number: -1 at first."""

    def __init__(self, boxes: Sequence[Box], shape: Sequence[int]) -> None:
        cuts = [sorted({0, size, *(edge for box in boxes for edge in box[d])}) for d, size in enumerate(shape)]
        self._cells = [{edge: cell for cell, edge in enumerate(edges)} for edges in cuts]
        self._numbers = np.full([len(edges) - 1 for edges in cuts], -1, np.int64)
        self._sizes = [np.diff(edges) for edges in cuts]

    def _slices(self, box: Box) -> tuple[slice, ...]:
        return tuple(slice(cells[start], cells[stop]) for cells, (start, stop) in zip(self._cells, box, strict=True))

    def write(self, box: Box, number: int) -> None:
        self._numbers[self._slices(box)] = number

    def numbers(self, box: Box) -> set[int]:
        return set(np.unique(self._numbers[self._slices(box)]).tolist())

    def elements(self, number: int) -> int:
        """Count the elements that have a number."""
        cells = np.argwhere(self._numbers == number)
        return sum(prod(int(sizes[i]) for sizes, i in zip(self._sizes, cell, strict=True)) for cell in cells)
