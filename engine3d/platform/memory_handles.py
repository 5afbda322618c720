"""Handles by which a process maps memory of another process of its node."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from engine3d.startup.lazy_imports import torch


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Names memory that a process shares. May be pickled and sent to any process of the node.

    Args:
        pid: the process that shares the memory, which has to live for as long as others map it.
        nbytes: of the whole storage.
    """

    pid: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CpuMemoryHandle(MemoryHandle):
    """Shared memory without a name: it goes with the last process that has it open or mapped.

    Args:
        fd: the file descriptor of it in process `pid`.
        inode: of the file, because numbers of processes and descriptors are used again.
    """

    fd: int
    inode: int


@dataclass(frozen=True, slots=True)
class CudaMemoryHandle(MemoryHandle):
    """Memory of one cudaMalloc. The arguments are those of `torch.UntypedStorage._new_shared_cuda`.

    Args:
        ipc_handle: of the whole allocation.
        offset_bytes: of the storage in it.
        ref_counter: the file in which torch counts who still maps the storage.
        ref_counter_offset: of this storage's counter.
        event: of torch; unused, because the sharing process waits for its stream instead.
    """

    ipc_handle: bytes
    offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes


class SharedStorages:
    """The storages that this process has shared or mapped, for as long as something else keeps them.

    A storage is shared once and mapped once. A process that maps what it shared itself gets the storage itself, which
    CUDA could not do.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[torch.UntypedStorage, MemoryHandle] = weakref.WeakKeyDictionary()
        self._storages: weakref.WeakValueDictionary[MemoryHandle, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def add(self, handle: MemoryHandle, storage: torch.UntypedStorage) -> None:
        self._handles[storage] = handle
        self._storages[handle] = storage

    def handle(self, storage: torch.UntypedStorage) -> MemoryHandle | None:
        return self._handles.get(storage)

    def storage(self, handle: MemoryHandle) -> torch.UntypedStorage | None:
        return self._storages.get(handle)
