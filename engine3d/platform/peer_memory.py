"""Memory of every rank of a group that all of them write into, without a collective operation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


WORD_BYTES = 16

type Copy = tuple[Tensor, Tensor]
"""Target and source of a copy, of one shape and dtype. One of them is of another rank."""


class PeerMemory(ABC):
    """Equal memory of each rank of a group on one host, mapped by all ranks.

    A rank calls `meet` before it copies into another rank's memory, after which nobody reads the former contents, and
    again afterwards, after which the copies may be read. Every rank makes the same calls in the same order.

    Args:
        rank: this one's, in the group.
        memory: of each rank, (nbytes,) uint8.
    """

    _VIEWS = 64
    """Most views that are kept."""

    def __init__(self, rank: int, memory: Sequence[Tensor]) -> None:
        self.rank, self._memory = rank, memory
        self._views: dict[tuple[object, ...], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self._memory[0].numel()

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first bytes of a rank's memory as a contiguous tensor. It has to be large enough."""
        kind = (rank, *shape, dtype)
        if kind not in self._views:
            if len(self._views) == self._VIEWS:  # of micro-batches of other lengths
                self._views.clear()
            used = math.prod(shape) * dtype.itemsize
            self._views[kind] = self._memory[rank][:used].view(dtype).view(*shape)
        return self._views[kind]

    @abstractmethod
    def meet(self) -> None:
        """Order what any rank queued before this before what this one queues from now on."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> Callable[[], None]:
        """Copy in this order, after what is queued now and concurrently with what is queued from now on.

        Work queued after a call of the returned function comes after the copies. The function keeps their sources.
        """


class PeerExchange(ABC):
    """Exchange of tensors of a few MB between the ranks of a group on one host, through mapped memory.

    Every rank makes the same calls in the same order, with tensors of one size, which are contiguous.

    Args:
        rank: this one's, in the group.
        ranks: of the group.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    @abstractmethod
    def all_gather(self, tensor: Tensor, into: Tensor) -> None:
        """Gather all ranks' tensors, of complete words of `WORD_BYTES`, into (ranks, ...), in the order of ranks."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, into: Tensor) -> None:
        """Sum index `rank` of each rank's (ranks, ...), complete words a rank, into `into`.

        The sum is in float32, in the order of ranks, and rounded to the dtype of `into` once.
        """


def sum_in_order(terms: Iterable[Tensor], into: Tensor) -> Tensor:
    """Write the sum of tensors like `into` there, in float32 and in their order, rounded once."""
    total = torch.zeros(into.shape, dtype=torch.float32)
    for term in terms:
        total += term.float()
    return into.copy_(total)
