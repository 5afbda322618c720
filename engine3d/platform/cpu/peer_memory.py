"""Memory of CPU processes that all of a group write into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from engine3d.platform.cpu import memory as cpu_memory
from engine3d.platform.memory_handles import MemoryHandle
from engine3d.platform.peer_memory import Copy, PeerMemory, sum_in_order


class CpuPeerMemory(PeerMemory):
    """In shared memory."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        own = torch.empty(nbytes, dtype=torch.uint8)
        handles: list[MemoryHandle | None] = [None] * group.size()
        dist.all_gather_object(handles, cpu_memory.share(own.untyped_storage()), group)
        mapped = [
            own if rank == group.rank() else torch.empty(0, dtype=torch.uint8).set_(cpu_memory.map_shared(handle))  # type: ignore[call-overload]
            for rank, handle in enumerate(handles)
            if handle is not None
        ]
        super().__init__(group.rank(), mapped)
        self._group = group

    def meet(self) -> None:
        dist.barrier(self._group)

    def collect(self, into: torch.Tensor) -> None:
        for rank, part in enumerate(into):
            part.copy_(self.of(rank, part.shape, part.dtype))

    def collect_sum(self, into: torch.Tensor) -> None:
        ranks = len(self._memory)
        sum_in_order((self.of(rank, (ranks, *into.shape), into.dtype)[self.rank] for rank in range(ranks)), into)

    def copy(self, copies: Sequence[Copy]) -> Callable[[], None]:
        for target, source in copies:
            target.copy_(source)
        return _nothing


def _nothing() -> None:
    """The copies are made."""
