"""Transfers between ranks, made of segments: runs of elements that lie in one buffer and go to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine3d.reshard.describe.shards import Alias


class Link(StrEnum):
    """Connection between a source and a target."""

    MEMORY = "same_memory"
    """Nothing: the target's buffer is the source's memory."""
    DEVICE = "same_device"
    NODE = "same_node"
    NETWORK = "between_nodes"


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of one transfer as columns of int64, one entry a segment, sorted by target buffer and offset.

    A segment is `rows` runs of `length` elements. Run r starts at element source_offset + r * source_stride of its
    source buffer and target_offset + r * target_stride of its target buffer. With one row the strides are `length`.
    Elements of a run are neighbours on both sides. The dtypes are those of the buffers. Where they differ the value is
    cast.
    """

    source_buffer: NDArray[np.int64]
    source_offset: NDArray[np.int64]
    source_stride: NDArray[np.int64]
    target_buffer: NDArray[np.int64]
    target_offset: NDArray[np.int64]
    target_stride: NDArray[np.int64]
    rows: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def joined(cls, numbered: Sequence[tuple[Segments, int, int]]) -> Segments:
        """The segments of several transfers as those of one, whose buffers are numbered consecutively.

        Args:
            numbered: segments, with the numbers that their first source buffer and their first target buffer get.
        """
        moved = [
            replace(
                segments, source_buffer=segments.source_buffer + source, target_buffer=segments.target_buffer + target
            )
            for segments, source, target in numbered
        ]
        empty = np.empty(0, dtype=np.int64)
        return cls(
            *(np.concatenate([empty, *(getattr(segments, name) for segments in moved)]) for name in cls.__slots__)
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def elements(self) -> int:
        return int((self.rows * self.length).sum())


@dataclass(frozen=True, slots=True)
class Transfer:
    """All that one source rank sends to one target rank.

    Args:
        source: index among the sources.
        target: index among the targets.
        link: connection between them. Never MEMORY.
        segments: elements that go.
        nbytes: of the target's dtypes.
    """

    source: int
    target: int
    link: Link
    segments: Segments
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Transfers between all ranks. Every needed element of every target comes from one source or is aliased.

    Args:
        transfers: sorted by source, then target.
        aliases: for each target, its bound buffers.
        bytes_needed: of all elements that the targets hold and that are not aliased: the least that can be moved.
        bytes_aliased: of the elements in aliased buffers.
    """

    transfers: tuple[Transfer, ...]
    aliases: tuple[tuple[Alias, ...], ...]
    bytes_needed: int
    bytes_aliased: int

    @property
    def bytes_moved(self) -> int:
        return sum(transfer.nbytes for transfer in self.transfers)
