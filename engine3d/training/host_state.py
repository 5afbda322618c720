"""An optimizer's state in host memory while models compute, on the device while it is updated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from engine3d.platform import platform

_CHUNK_BYTES = 1 << 30
"""Of the pieces in which memory is taken on both sides: large, so that the device's can be cut for anything else."""

_ALIGNMENT = 256


@dataclass
class _Slot:
    """Where a tensor of the state lies.

    Args:
        state: an optimizer's, of one parameter; it always holds the tensor, wherever that is.
        name: of the tensor in it.
        start: first byte in its chunk.
    """

    state: dict[str, Any]
    name: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class _Chunk:
    nbytes: int = 0
    slots: list[_Slot] = field(default_factory=list)
    host: Tensor | None = None
    device: Tensor | None = None


class HostState:
    """Moves what Megatron-Core's optimizers keep of their parameters between the device and page-locked host memory.

    Args:
        optimizer: Megatron-Core's, over one or several.
        device: where updates are made.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self._device = device
        self._chunks: list[_Chunk] = []

    @property
    def nbytes(self) -> int:
        """Host memory that is held, but for what PyTorch takes more: it rounds each GiB or less to a power of two."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self) -> None:
        """Have the state on the device; a state that was never put away is there."""
        for chunk in self._chunks:
            if chunk.device is None and chunk.host is not None:
                chunk.device = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
                chunk.device.copy_(chunk.host, non_blocking=True)
                for slot in chunk.slots:
                    slot.state[slot.name] = slot.view(chunk.device)

    def put_away(self) -> None:
        """Have the state in host memory alone."""
        if not self._is_known():
            self._chunks = []  # made by the first update, or loaded
            self._chunks = list(self._arranged())
        for chunk in self._chunks:
            if chunk.host is None:
                chunk.host = platform.host_memory(chunk.nbytes)
                for slot in chunk.slots:
                    slot.view(chunk.host).copy_(slot.state[slot.name], non_blocking=True)
            elif chunk.device is not None:
                chunk.host.copy_(chunk.device, non_blocking=True)
        platform.synchronize()
        for chunk in self._chunks:
            assert chunk.host is not None
            for slot in chunk.slots:
                slot.state[slot.name] = slot.view(chunk.host)
            chunk.device = None

    def _tensors(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        for optimizer in self._optimizers:
            if not optimizer.is_stub_optimizer:
                for state in optimizer.optimizer.state.values():
                    for name, tensor in state.items():
                        if isinstance(tensor, Tensor) and tensor.numel() > 1:
                            yield state, name, tensor

    def _is_known(self) -> bool:
        """Whether every tensor of the state is a part of the chunks."""
        known = {
            memory.untyped_storage().data_ptr()
            for chunk in self._chunks
            for memory in (chunk.host, chunk.device)
            if memory is not None
        }
        return all(tensor.untyped_storage().data_ptr() in known for _, _, tensor in self._tensors())

    def _arranged(self) -> Iterator[_Chunk]:
        """Chunks with a place for every tensor."""
        chunk = _Chunk()
        for state, name, tensor in self._tensors():
            slot = _Slot(state, name, chunk.nbytes, tensor.shape, tensor.dtype)
            if chunk.nbytes and chunk.nbytes + slot.nbytes > _CHUNK_BYTES:
                yield chunk
                chunk = _Chunk()
                slot.start = 0
            chunk.slots.append(slot)
            chunk.nbytes += -(-slot.nbytes // _ALIGNMENT) * _ALIGNMENT
        if chunk.slots:
            yield chunk
