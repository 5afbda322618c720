"""Offload of a model's weights and optimizer between its turns, and onload into the same tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine3d.errors import EngineError, amount, first_line
from engine3d.platform import platform
from engine3d.platform.offload_memory import OffloadMemory

CHUNK_BYTES = 1 << 29
"""Memory that is allocated at once. A larger storage has a chunk of its own."""

LEAST_BYTES = 1 << 12
"""Smaller storages stay: an optimizer's counters, a norm's bias."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Statistics of a rank's offloading.

    Args:
        offload_s: seconds of offloading.
        onload_s: seconds of onloading.
        nbytes: most device memory that was free while the model was offloaded.
    """

    offload_s: float = 0.0
    onload_s: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _StorageSlot:
    """Location of a storage's bytes."""

    storage: torch.UntypedStorage
    nbytes: int
    chunk: int
    start: int


class Offload:
    """Offload of some tensors' device memory.

    Tensors stay the same objects. An offloaded storage has no bytes, and all views of it have their elements again when
    it is onloaded. Bits are copied, never computed with.

    Args:
        device: of the tensors.
        constant: their values never change, so that they are copied to host memory once; see `forget`.
    """

    def __init__(self, device: torch.device, *, constant: bool) -> None:
        self._device, self._constant = device, constant
        self._chunks: list[OffloadMemory] = []
        self._slots: dict[int, _StorageSlot] = {}
        self._is_offloaded = self._is_copied = False
        self._stats = OffloadStats()

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to host memory and free their device memory.

        Raises:
            EngineError: host memory is too small for them; they are still on the device.
        """
        if self._is_offloaded:
            return
        began = time.perf_counter()
        platform.synchronize()
        if not self._is_copied:
            self._slots = self._slots_of(tensors)
        for number, chunk in enumerate(self._chunks):
            slots = [slot for slot in self._slots.values() if slot.chunk == number]
            if not self._is_copied:
                for slot in slots:
                    self._bytes(slot).copy_(_flat(slot.storage, self._device), non_blocking=True)
                platform.synchronize()
            for slot in slots:
                slot.storage.resize_(0)
            chunk.rest()
        self._is_offloaded, self._is_copied = True, self._constant
        platform.empty_cache()
        nbytes = sum(slot.nbytes for slot in self._slots.values())
        self._count(offload_s=time.perf_counter() - began, nbytes=nbytes)

    def onload(self) -> None:
        """Copy everything back to the device, as it was."""
        if not self._is_offloaded:
            return
        began = time.perf_counter()
        for number, chunk in enumerate(self._chunks):
            for slot in self._slots.values():
                if slot.chunk == number:
                    slot.storage.resize_(slot.nbytes)
                    _flat(slot.storage, self._device).copy_(self._bytes(slot), non_blocking=True)
            platform.synchronize()
            chunk.rest()
        self._is_offloaded = False
        if not self._constant:
            self._slots = {}
        self._count(onload_s=time.perf_counter() - began)

    @property
    def is_offloaded(self) -> bool:
        return self._is_offloaded

    def forget(self) -> None:
        """Copy constant tensors again the next time, because their values have changed."""
        self._is_copied = False

    def where(self, tensor: Tensor) -> Tensor:
        """The tensor; while it is offloaded the same elements in host memory, for reading only.

        To be called before the tensor is sliced: torch slices no tensor of a storage without bytes.
        """
        slot = self._slots.get(_key(tensor)) if self._is_offloaded else None
        if slot is None:
            return tensor
        copy = self._bytes(slot).view(tensor.dtype)
        return copy.as_strided(tensor.size(), tensor.stride(), copy.storage_offset() + tensor.storage_offset())

    def take_stats(self) -> OffloadStats:
        """Return the statistics since the last call."""
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def _slots_of(self, tensors: Iterable[Tensor]) -> dict[int, _StorageSlot]:
        """Allocate a slot for each storage that is on the device."""
        slots: dict[int, _StorageSlot] = {}
        sizes: list[int] = []
        for tensor in tensors:
            storage, key = tensor.untyped_storage(), _key(tensor)
            if tensor.device.type != self._device.type or storage.nbytes() < LEAST_BYTES or key in slots:
                continue
            nbytes = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            if not sizes or sizes[-1] + nbytes > CHUNK_BYTES:
                sizes.append(0)
            slots[key] = _StorageSlot(storage, storage.nbytes(), len(sizes) - 1, sizes[-1])
            sizes[-1] += nbytes
        self._allocate(sizes)
        return slots

    def _allocate(self, sizes: list[int]) -> None:
        try:
            for number, nbytes in enumerate(sizes):
                if number == len(self._chunks):
                    self._chunks.append(platform.offload_memory(nbytes))
                elif self._chunks[number].tensor.numel() < nbytes:
                    self._chunks[number] = platform.offload_memory(nbytes)
        except (RuntimeError, MemoryError) as error:
            why = first_line(error)
            raise EngineError(
                f"host memory: no room for the {amount(sum(sizes), 1)} of a model with offload=true between its "
                f"turns ({why}); set offload=false for it, or give the node more memory"
            ) from None

    def _bytes(self, slot: _StorageSlot) -> Tensor:
        return self._chunks[slot.chunk].tensor[slot.start : slot.start + slot.nbytes]

    def _count(self, *, offload_s: float = 0.0, onload_s: float = 0.0, nbytes: int = 0) -> None:
        so_far = self._stats
        self._stats = replace(
            so_far,
            offload_s=so_far.offload_s + offload_s,
            onload_s=so_far.onload_s + onload_s,
            nbytes=max(so_far.nbytes, nbytes),
        )


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """(nbytes,) uint8 of a storage's memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
