"""Memory of a CPU process that other processes of the node map."""

from __future__ import annotations

import os
from pathlib import Path

from engine3d.errors import EngineError
from engine3d.platform.memory_handles import CpuMemoryHandle, MemoryHandle, SharedStorages
from engine3d.startup.lazy_imports import torch

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
