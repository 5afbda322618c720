"""Memory of a CPU process that other processes of the node map."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from engine3d.errors import EngineError
from engine3d.platform.memory_handles import CpuMemoryHandle, MemoryHandle, SharedStorages
from engine3d.platform.peer_memory import Copy, PeerExchange, PeerMemory, sum_in_order
from engine3d.startup.lazy_imports import dist, torch

_SHARED_MEMORY = Path("/dev/shm")

_shared = SharedStorages()


def share(storage: torch.UntypedStorage) -> MemoryHandle:
    """Move a storage into shared memory, in place: every tensor that views it follows, and keeps its values."""
    known = _shared.handle(storage)
    if known is not None:
        return known
    if storage.nbytes() and not storage.is_shared():
        _check_free(storage.nbytes())
    # Opened by torch under a name that it removes at once: a process that is killed leaves nothing.
    fd, nbytes = storage._share_fd_cpu_()
    inode = os.fstat(fd).st_ino if nbytes else 0
    handle = CpuMemoryHandle(pid=os.getpid(), nbytes=nbytes, fd=fd, inode=inode)
    _shared.add(handle, storage)
    return handle


def map_shared(handle: MemoryHandle) -> torch.UntypedStorage:
    """The memory of a handle, for reading and writing."""
    if not isinstance(handle, CpuMemoryHandle):
        raise EngineError(f"memory of process {handle.pid} is not memory of a CPU: {type(handle).__name__}")
    known = _shared.storage(handle)
    if known is not None:
        return known
    if handle.nbytes == 0:
        return torch.UntypedStorage(0)
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
    except OSError as error:
        raise EngineError(
            f"process {handle.pid}, whose {handle.nbytes} bytes were to be mapped, is gone or does not share them any "
            f"more ({error.strerror})"
        ) from None
    try:
        if os.fstat(fd).st_ino != handle.inode:
            raise EngineError(f"process {handle.pid} does not share its {handle.nbytes} bytes any more")
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, handle.nbytes)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    _shared.add(handle, storage)
    return storage


def _check_free(nbytes: int) -> None:
    """torch reserves the memory too, but says of a full file system only that it could not."""
    file_system = os.statvfs(_SHARED_MEMORY)
    free = file_system.f_bavail * file_system.f_frsize
    if nbytes > free:
        raise EngineError(
            f"{_SHARED_MEMORY} has {free} bytes free of the {nbytes} that a parameter buffer needs: enlarge it "
            f"(docker run --shm-size, or mount -o remount,size=... {_SHARED_MEMORY})"
        )


class CpuPeerMemory(PeerMemory):
    """Peer memory in shared memory."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        local = torch.empty(nbytes, dtype=torch.uint8)
        handles: list[MemoryHandle | None] = [None] * group.size()
        dist.all_gather_object(handles, share(local.untyped_storage()), group)
        mapped = [
            local if rank == group.rank() else torch.empty(0, dtype=torch.uint8).set_(map_shared(handle))  # type: ignore[call-overload]
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
