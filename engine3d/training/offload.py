"""A model's weights and optimizer out of its device between its turns, and back in the same tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine3d.errors import EngineError, amount, first_line
from engine3d.platform import platform
from engine3d.platform.away import AwayMemory

CHUNK_BYTES = 1 << 29
"""Of memory that is taken at once; a larger storage has a chunk of its own."""

LEAST_BYTES = 1 << 12
"""Smaller storages stay: an optimizer's counters, a norm's bias."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """What a rank has moved.

    Args:
        away_s: seconds of bringing it out of the device.
        back_s: seconds of bringing it back.
        nbytes: of the device's memory that is free while it is away, at most.
    """

    away_s: float = 0.0
    back_s: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a storage's bytes are."""

    storage: torch.UntypedStorage
    nbytes: int
    chunk: int
    start: int


class Offload:
    """The device memory of some tensors, away and back.

    Tensors stay the same objects: a storage of which nothing is left on the device has no bytes, and all views of it
    have their elements again when it is back. Bits are copied, never computed with.

    Args:
        device: where the tensors are.
        constant: their values never change, so that they are copied out of the device once; see `forget`.
    """

    def __init__(self, device: torch.device, *, constant: bool) -> None:
        self._device, self._constant = device, constant
        self._chunks: list[AwayMemory] = []
        self._places: dict[int, _Place] = {}
        self._is_away = self._is_copied = False
        self._figures = OffloadFigures()

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages out of the device and give their memory back.

        Raises:
            EngineError: there is no room for them; they are still on the device.
        """
        if self._is_away:
            return
        began = time.perf_counter()
        platform.synchronize()
        if not self._is_copied:
            self._places = self._placed(tensors)
        for number, chunk in enumerate(self._chunks):
            places = [place for place in self._places.values() if place.chunk == number]
            if not self._is_copied:
                for place in places:
                    self._bytes(place).copy_(_flat(place.storage, self._device), non_blocking=True)
                platform.synchronize()
            for place in places:
                place.storage.resize_(0)
            chunk.rest()
        self._is_away, self._is_copied = True, self._constant
        platform.empty_cache()
        nbytes = sum(place.nbytes for place in self._places.values())
        self._count(away_s=time.perf_counter() - began, nbytes=nbytes)

    def bring_back(self) -> None:
        """Have everything on the device again, as it was."""
        if not self._is_away:
            return
        began = time.perf_counter()
        for number, chunk in enumerate(self._chunks):
            for place in self._places.values():
                if place.chunk == number:
                    place.storage.resize_(place.nbytes)
                    _flat(place.storage, self._device).copy_(self._bytes(place), non_blocking=True)
            platform.synchronize()
            chunk.rest()
        self._is_away = False
        if not self._constant:
            self._places = {}
        self._count(back_s=time.perf_counter() - began)

    @property
    def is_away(self) -> bool:
        return self._is_away

    def forget(self) -> None:
        """Values of constant tensors have been changed: the next time they are copied again."""
        self._is_copied = False

    def where(self, tensor: Tensor) -> Tensor:
        """The tensor; while it is away the same elements where they are, for reading only.

        To be asked before the tensor is sliced: torch slices no tensor of a storage without bytes.
        """
        place = self._places.get(_key(tensor)) if self._is_away else None
        if place is None:
            return tensor
        there = self._bytes(place).view(tensor.dtype)
        return there.as_strided(tensor.size(), tensor.stride(), there.storage_offset() + tensor.storage_offset())

    def take_figures(self) -> OffloadFigures:
        """What was moved since the last call."""
        found, self._figures = self._figures, OffloadFigures()
        return found

    def _placed(self, tensors: Iterable[Tensor]) -> dict[int, _Place]:
        """A place for each storage that is on the device, with the memory for it."""
        places: dict[int, _Place] = {}
        sizes: list[int] = []
        for tensor in tensors:
            storage, key = tensor.untyped_storage(), _key(tensor)
            if tensor.device.type != self._device.type or storage.nbytes() < LEAST_BYTES or key in places:
                continue
            room = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            if not sizes or sizes[-1] + room > CHUNK_BYTES:
                sizes.append(0)
            places[key] = _Place(storage, storage.nbytes(), len(sizes) - 1, sizes[-1])
            sizes[-1] += room
        self._take(sizes)
        return places

    def _take(self, sizes: list[int]) -> None:
        try:
            for number, nbytes in enumerate(sizes):
                if number == len(self._chunks):
                    self._chunks.append(platform.away_memory(nbytes))
                elif self._chunks[number].tensor.numel() < nbytes:
                    self._chunks[number] = platform.away_memory(nbytes)
        except (RuntimeError, MemoryError) as error:
            why = first_line(error)
            raise EngineError(
                f"host memory: no room for the {amount(sum(sizes), 1)} of a model with offload=true between its "
                f"turns ({why}); set offload=false for it, or give the node more memory"
            ) from None

    def _bytes(self, place: _Place) -> Tensor:
        return self._chunks[place.chunk].tensor[place.start : place.start + place.nbytes]

    def _count(self, *, away_s: float = 0.0, back_s: float = 0.0, nbytes: int = 0) -> None:
        so_far = self._figures
        self._figures = replace(
            so_far,
            away_s=so_far.away_s + away_s,
            back_s=so_far.back_s + back_s,
            nbytes=max(so_far.nbytes, nbytes),
        )


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """(nbytes,) uint8 of a storage's memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
