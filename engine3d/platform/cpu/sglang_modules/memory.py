"""SGLang's memory saver on a CPU: memory that an engine releases goes back to the system, and its addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAGE = mmap.PAGESIZE
_GARBAGE = 0xA5
"""Every byte of memory that is resumed, so that what nobody writes again shows."""


class CpuMemorySaver:
    """torch_memory_saver for a CPU, with the methods of SGLang's adapter.

    Every complete page of released memory goes back to the system. Tensors keep their addresses, and lose their
    contents.
    """

    def __init__(self) -> None:
        self._storages: dict[str, WeakSet[torch.UntypedStorage]] = {}

    @property
    def enabled(self) -> bool:
        return True

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """All memory that torch takes in the block is released and resumed by this tag."""
        assert not enable_cpu_backup, "weights come back by a transfer"
        with _Recording(self._storages.setdefault(tag, WeakSet())):
            yield

    def pause(self, tag: str) -> None:
        """Release the memory."""
        for storage in self._storages.get(tag, ()):
            first = -(-storage.data_ptr() // _PAGE) * _PAGE
            nbytes = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE - first
            if nbytes > 0 and _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
                raise RuntimeError(f"madvise of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")

    def resume(self, tag: str) -> None:
        """Take the memory again, filled with `_GARBAGE`."""
        for storage in self._storages.get(tag, ()):
            ctypes.memset(storage.data_ptr(), _GARBAGE, storage.nbytes())

    def check_validity(self, caller_name: str) -> None:
        """Do nothing: it always works."""

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Do nothing: no library has to be loaded before others."""
        return nullcontext()

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()


def create(enable: bool) -> Any:
    """Replace `TorchMemorySaverAdapter.create`: all of SGLang in this process has one saver."""
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop

    return _saver if enable else _TorchMemorySaverAdapterNoop()


class _Recording(TorchDispatchMode):
    """Notes the memory that torch's operations take: not that of a view of something, which may be from before."""

    def __init__(self, storages: WeakSet[torch.UntypedStorage]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in inputs:
                self._storages.add(tensor.untyped_storage())
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors on the CPU."""
    leaves = tree_leaves(values)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu")


_libc = ctypes.CDLL(None, use_errno=True)
_saver = CpuMemorySaver()
