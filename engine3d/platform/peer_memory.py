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
"""Of the second into the first, which are alike; one of them is of another rank."""


class PeerMemory(ABC):
    """As many bytes of each rank of a group, whose ranks are all on one host, mapped by all of them.

    Who copies into another rank's memory calls `meet` before, after which nobody reads any more what was there, and
    after it, after which all that was copied may be read: the same calls in the same order on every rank.

    Args:
        rank: this one's, in the group.
        memory: of each rank, (nbytes,) uint8.
    """

    _VIEWS = 64
    """Of so many kinds at most what `of` gave is kept."""

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
        """What any rank queued before this is done before what this one queues from now on."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> Callable[[], None]:
        """Copy in this order, after what is queued now and beside what is queued from now on.

        What is queued after a call of the function that is returned comes after the copies. It keeps their sources.
        """


class PeerExchange(ABC):
    """Tensors of a few MB between the ranks of a group, all on one host, by memory that all of them have mapped.

    Every rank makes the same calls in the same order, with tensors of one size, which are contiguous.

    Args:
        rank: this one's, in the group.
        ranks: of the group.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    @abstractmethod
    def gather(self, own: Tensor, into: Tensor) -> None:
        """What every rank gives, in the order of ranks, into (ranks, ...): whole words of `WORD_BYTES` of each."""

    @abstractmethod
    def add_up(self, whole: Tensor, into: Tensor) -> None:
        """The sum over ranks of what each has for this one: of (ranks, ...), whole words a rank, its index.

        It is in float32, in the order of ranks, and rounded to the dtype of `into` once.
        """


def sum_in_order(parts: Iterable[Tensor], into: Tensor) -> Tensor:
    """The sum of parts like `into`, in float32 and in their order, rounded once; it is written there."""
    total = torch.zeros(into.shape, dtype=torch.float32)
    for part in parts:
        total += part.float()
    return into.copy_(total)
