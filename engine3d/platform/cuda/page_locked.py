"""Page-locked host memory of exactly the requested size, which PyTorch would round up to a power of two."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch


def page_locked(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8. It is freed once no tensor views it, and what was queued before is done.

    Raises:
        RuntimeError: there is not so much.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    runtime, address = _runtime(), ctypes.c_void_p()
    failed = runtime.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
    if failed:
        runtime.cudaGetLastError()  # forgotten, or PyTorch takes it for a failure of what is queued next
        raise RuntimeError(f"cudaHostAlloc: {runtime.cudaGetErrorString(failed).decode()}")
    assert address.value is not None
    return tensor_at(address.value, nbytes, partial(_free, address, torch.cuda.current_device()))


def tensor_at(address: int, nbytes: int, release: Callable[[], None]) -> torch.Tensor:
    """(nbytes,) uint8 over memory; `release` is called when no tensor views it any more."""
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(block, release).atexit = False  # the end of a process frees everything
    return torch.frombuffer(block, dtype=torch.uint8)  # its storage keeps the block


def _free(address: ctypes.c_void_p, device: int) -> None:
    with torch.cuda.device(device):  # whichever thread this is
        _runtime().cudaFreeHost(address)  # waits for the device: copies may still be in flight


@cache
def _runtime() -> ctypes.CDLL:
    """CUDA's, through the library of PyTorch that needs it: PyTorch has no function of its own for this."""
    runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
