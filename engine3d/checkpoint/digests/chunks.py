"""Elements of the HuggingFace model in a flat range of a rank's parameter: integer arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from engine3d.errors import EngineError
from engine3d.models.rules import Box, LocalParameter

if TYPE_CHECKING:
    from torch import Tensor

MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk of a tensor in a file, unless a single row is larger. Bounds what is in memory at a time."""


@dataclass(frozen=True, slots=True)
class FlatChunk:
    """`length` elements from `offset` of a flat range are the elements `box` of the tensor `hf_name`.

    They are in the tensor's order, or if `is_stacked` in that of the parameter (`TensorSlice`).
    """

    hf_name: str
    box: Box
    offset: int
    length: int
    is_stacked: bool = False

    def view(self, values: Tensor) -> Tensor:
        """View the elements of the chunk, of one dimension, as the box of the tensor."""
        if not self.is_stacked:
            return values.view(extents(self.box))
        inner = extents(self.box)[1:]
        return values.view(inner[::-1]).permute(*reversed(range(len(inner))))[None]


def flat_chunks(local: LocalParameter, start: int, stop: int, max_elements: int) -> Iterator[FlatChunk]:
    """The HuggingFace elements of the elements [start, stop) of a parameter, counted in row-major order.

    Elements that pad the parameter are in no chunk.

    Args:
        local: the parameter, of one or two dimensions, or of three with one in the middle (a convolution's).
        start, stop: what the rank holds of it; offsets of the chunks count from `start`.
        max_elements: of a chunk, unless a row has more.
    """
    middle = local.shape[1:-1]
    if middle not in ((), (1,)):
        raise EngineError(f"parameter {local.name}: has shape {list(local.shape)}, expected one or two dimensions")
    width = prod(local.shape[1:])
    for box in _row_boxes((local.shape[0], width) if middle else local.shape, start, stop):
        for region in local.slices:
            if region.local_box[1:] != tuple((0, size) for size in local.shape[1:]):
                raise EngineError(f"parameter {local.name}: a region of tensor {region.hf_name} has no complete rows")
            first, last = max(box[0][0], region.local_box[0][0]), min(box[0][1], region.local_box[0][1])
            step = max(1, max_elements // width)
            for row in range(first, last, step):
                rows = (row, min(last, row + step))
                block = (rows, *((0, 1) for _ in middle), *box[1:])
                inner = region.hf_box[:0:-1] if region.is_stacked else region.hf_box
                shifted = tuple(
                    (begin - local_side[0] + hf_side[0], end - local_side[0] + hf_side[0])
                    for (begin, end), local_side, hf_side in zip(block, region.local_box, inner, strict=True)
                )
                offset = row * width + (box[1][0] if len(box) > 1 else 0) - start
                hf_box = (region.hf_box[0], *reversed(shifted)) if region.is_stacked else shifted
                yield FlatChunk(region.hf_name, hf_box, offset, elements(hf_box), region.is_stacked)


def _row_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """A flat range as at most three boxes: the end of a row, complete rows, the beginning of a row."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    width = shape[1]
    (first, begin), (last, end) = divmod(start, width), divmod(stop, width)
    if first == last:
        yield ((first, first + 1), (begin, end))
        return
    if begin:
        yield ((first, first + 1), (begin, width))
        first += 1
    if first < last:
        yield ((first, last), (0, width))
    if end:
        yield ((last, last + 1), (0, end))


def elements(box: Box) -> int:
    """Number of elements of a box."""
    return prod(stop - start for start, stop in box)


def extents(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(stop - start for start, stop in box)
