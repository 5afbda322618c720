"""Host memory on the way to files and from them, page-locked where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from engine3d.checkpoint.digests.chunks import MAX_CHUNK_BYTES
from engine3d.platform import platform

_CHUNK_BYTES = 1 << 30
_ALIGNMENT = 64


class Staging:
    """Chunks of host memory into which a state is copied, so that training continues while files are written from it.

    They are taken once and used for every save. Those that are too small for a state that has grown are replaced.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(chunk.numel() for chunk in self._chunks)

    def tensors(self, sizes: Iterable[tuple[int, torch.dtype]]) -> list[Tensor]:
        """One-dimensional host tensors of these numbers of elements and dtypes; their previous values are lost."""
        placed: list[tuple[int, int, int, torch.dtype]] = []
        chunk, used, needed = 0, 0, [0]
        for count, dtype in sizes:
            nbytes = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            if used and used + nbytes > _CHUNK_BYTES:
                chunk, used = chunk + 1, 0
                needed.append(0)
            placed.append((chunk, used, count, dtype))
            used += nbytes
            needed[chunk] = used
        for index, nbytes in enumerate(needed):
            if index == len(self._chunks):
                self._chunks.append(platform.host_memory(nbytes))
            elif self._chunks[index].numel() < nbytes:
                self._chunks[index] = platform.host_memory(nbytes)
        return [
            self._chunks[chunk][start : start + count * dtype.itemsize].view(dtype)
            for chunk, start, count, dtype in placed
        ]


class HostBuffer:
    """Host memory through which tensors pass between a device and a file, one at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A tensor as it is if it is in host memory, else a copy, which is good until the next call."""
        if tensor.device.type == "cpu":
            return tensor
        return self.tensor(tensor.shape, tensor.dtype).copy_(tensor)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer, which overwrites the previous one."""
        nbytes = prod(shape) * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = platform.host_scratch(max(nbytes, MAX_CHUNK_BYTES))
        return self._memory[:nbytes].view(dtype).view(shape)
