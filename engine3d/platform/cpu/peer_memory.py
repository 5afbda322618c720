"""Memory of CPU processes that all of a group write into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine3d.platform.cpu import memory as cpu_memory
from engine3d.platform.memory_handles import MemoryHandle
from engine3d.platform.peer_memory import Copy, PeerExchange, PeerMemory, sum_in_order
from engine3d.startup.lazy_imports import dist, torch


class CpuPeerMemory(PeerMemory):
    """Peer memory in shared memory."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        local = torch.empty(nbytes, dtype=torch.uint8)
        handles: list[MemoryHandle | None] = [None] * group.size()
        dist.all_gather_object(handles, cpu_memory.share(local.untyped_storage()), group)
        mapped = [
            local if rank == group.rank() else torch.empty(0, dtype=torch.uint8).set_(cpu_memory.map_shared(handle))  # type: ignore[call-overload]
            for rank, handle in enumerate(handles)
            if handle is not None
        ]
        super().__init__(group.rank(), mapped)
        self._group = group

    def meet(self) -> None:
        dist.barrier(self._group)

    def copy(self, copies: Sequence[Copy]) -> Callable[[], None]:
        for target, source in copies:
            target.copy_(source)
        return _nothing


class CpuPeerExchange(PeerExchange):
    """Exchange in which each rank writes its tensor into its own memory, and reads all tensors where they are."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        super().__init__(group.rank(), group.size())
        self._memory = CpuPeerMemory(group, nbytes)

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._put(tensor)
        for rank, target in enumerate(into):
            target.copy_(self._memory.of(rank, tensor.shape, tensor.dtype))

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._put(tensor)
        terms = (self._memory.of(rank, tensor.shape, tensor.dtype)[self.rank] for rank in range(self.ranks))
        sum_in_order(terms, into)

    def _put(self, tensor: torch.Tensor) -> None:
        self._memory.meet()  # everyone has read what was there
        self._memory.of(self.rank, tensor.shape, tensor.dtype).copy_(tensor)
        self._memory.meet()


def _nothing() -> None:
    """Wait for nothing: the copies are made."""
