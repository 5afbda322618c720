"""Memory of a GPU that other processes of the node map, through CUDA IPC."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine3d.errors import EngineError, first_line
from engine3d.platform.memory_handles import CudaMemoryHandle, MemoryHandle, SharedStorages

_EXPANDABLE = b"e"
"""The second byte of torch's handle for memory of an expandable segment; "c" stands for cudaMalloc."""

_shared = SharedStorages()


def share(storage: torch.UntypedStorage) -> MemoryHandle:
    """The handle of a storage, which stays where it is. Waits for the device's current stream."""
    known = _shared.handle(storage)
    if known is not None:
        return known
    nbytes = storage.nbytes()
    try:
        _, ipc_handle, _, offset_bytes, ref_counter, ref_counter_offset, event, _ = storage._share_cuda_()
    except RuntimeError as error:
        raise EngineError(f"{_not_exported(nbytes)} ({first_line(error)})") from error
    if ipc_handle is None:
        ipc_handle = ref_counter = event = b""
        offset_bytes = ref_counter_offset = 0
    if ipc_handle[1:2] == _EXPANDABLE:
        raise EngineError(_not_exported(nbytes))
    # Instead of torch's event, which a process that does not see this GPU cannot be sure to open.
    torch.cuda.current_stream(storage.device).synchronize()
    handle = CudaMemoryHandle(
        pid=os.getpid(),
        nbytes=nbytes,
        ipc_handle=ipc_handle,
        offset_bytes=offset_bytes,
        ref_counter=ref_counter,
        ref_counter_offset=ref_counter_offset,
        event=event,
    )
    _shared.add(handle, storage)
    return handle


def map_shared(handle: MemoryHandle) -> torch.UntypedStorage:
    """The memory of a handle, as memory of this process's current device, whichever GPU it lies on."""
    if not isinstance(handle, CudaMemoryHandle):
        raise EngineError(f"memory of process {handle.pid} is not memory of a GPU: {type(handle).__name__}")
    known = _shared.storage(handle)
    if known is not None:
        return known
    device = torch.cuda.current_device()
    if handle.nbytes == 0:
        return torch.UntypedStorage(0, device=torch.device("cuda", device))
    if not Path(f"/proc/{handle.pid}").exists():
        raise EngineError(f"process {handle.pid}, whose {handle.nbytes} bytes of GPU memory were to be mapped, is gone")
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            handle.ipc_handle,
            handle.nbytes,
            handle.offset_bytes,
            handle.ref_counter,
            handle.ref_counter_offset,
            handle.event,
            False,
        )
    except RuntimeError as error:
        raise EngineError(
            f"{handle.nbytes} bytes of GPU memory of process {handle.pid} cannot be mapped "
            f"({first_line(error)}): the process is gone, or its GPU is no peer of this one"
        ) from error
    _shared.add(handle, storage)
    return storage


def _not_exported(nbytes: int) -> str:
    return (
        f"a storage of {nbytes} bytes of GPU memory cannot be shared with other processes: it has to come from "
        "cudaMalloc, not from torch_memory_saver or an expandable segment, and so be taken within "
        "platform.shareable_memory()"
    )
