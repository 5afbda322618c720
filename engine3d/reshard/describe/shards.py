"""Shards of one rank on either side of a weight transfer: which elements of the model lie where in its memory.

Offsets, strides and lengths are in elements of the buffer's dtype, never in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from engine3d.dtypes import ITEMSIZES
from engine3d.models.rules import Box


@dataclass(frozen=True, slots=True)
class Location:
    """Node and device that a rank's memory is on. A device's name is unique on its node."""

    node: str
    device: str

    def __str__(self) -> str:
        return f"{self.device} of {self.node}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous stretch of a rank's memory.

    Args:
        name: of the parameter or parameter buffer that it is; errors name it.
        dtype: of its elements, such as "bfloat16".
        shape: of the contiguous tensor that it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Holding:
    """Box of a HuggingFace tensor in a buffer.

    The element at index i of the tensor, with box[d][0] <= i[d] < box[d][1], is the buffer's element
    `offset + sum((i[d] - box[d][0]) * strides[d])`.

    Args:
        tensor: the HuggingFace name.
        box: a range for each of the tensor's dimensions.
        buffer: index of the buffer.
        offset: of the box's first element in the buffer.
        strides: one for each of the tensor's dimensions.
    """

    tensor: str
    box: Box
    buffer: int
    offset: int
    strides: tuple[int, ...]

    def has(self, element: int) -> bool:
        """True if an element of the buffer belongs to the box."""
        left = element - self.offset
        for stride, (start, stop) in sorted(zip(self.strides, self.box, strict=True), reverse=True):
            if stop - start > 1:
                left -= stride * max(0, min(left // stride, stop - start - 1))
        return left == 0


@dataclass(frozen=True, slots=True)
class Alias:
    """Binding of a complete buffer of an engine rank to memory of a trainer's rank, with strides.

    Args:
        target_buffer: index of the engine rank's buffer, whose element at index i (of its shape) is the source
            buffer's element `offset + sum(i[d] * strides[d])`.
        source_rank: the trainer's rank.
        source_buffer: index of that rank's buffer.
        offset: of the first element.
        strides: one for each dimension of the target buffer's shape.
    """

    target_buffer: int
    source_rank: int
    source_buffer: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankShards:
    """Shards of a model on one rank, of the trainer (a source) or of an engine (a target).

    Args:
        name: how errors call the rank, such as "actor rank 3" or "engine 0 rank 1".
        rank: its number among the sources, or among the targets counted over all engines.
        location: node and device of its memory.
        buffers: its memory. All of a target's elements that SGLang loads are in its holdings.
        holdings: contents of the buffers. No two of a target overlap in memory.
        aliases: of a target: buffers that are bound to a trainer's memory. Nothing moves for them.
        owner: how errors call the trainer or the engine that the rank belongs to.
    """

    name: str
    rank: int
    location: Location
    buffers: tuple[Buffer, ...]
    holdings: tuple[Holding, ...]
    aliases: tuple[Alias, ...] = ()
    owner: str = "the engine"

    def tensor_at(self, buffer: int, element: int) -> str | None:
        """The HuggingFace tensor that an element of a buffer belongs to, if it is of any."""
        return next(
            (holding.tensor for holding in self.holdings if holding.buffer == buffer and holding.has(element)), None
        )
