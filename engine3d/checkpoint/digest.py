"""A number for the weights that a rank holds: the same for the same bits, and no others in all likelihood.

Cheap enough for every step: each rank reads its weights once, as they lie, and asks no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine3d.checkpoint.state import HeldParameter, held_parameters

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

_CHUNK = 1 << 25
"""Bytes at a time; four times as many are taken in all."""
_WORD = 8
"""Bytes that are multiplied at a time."""
_SPREAD = -7046029254386353131
"""2^64 divided by the golden ratio, as int64: multiples of it look as if drawn at random."""
_STEP = 6364136223846793005
_MASTER = "master_param"
"""What Transformer Engine's Adam calls the master weight, or the half of it that the model's own lacks."""


def weights_digest(engine: TrainEngine) -> str:
    """Of all that this rank holds: the master weights where it keeps some, in the order of the model's rules.

    A step of a run that is made again on the same layout has the same weights where every rank has the same digest.
    What an optimizer keeps in host memory is taken in while the next update has it on the device, from the first call
    on: to bring it there once more takes longer than all else.

    Returns:
        16 hexadecimal digits.
    """
    held = held_parameters(engine)
    parts = [part for each in held for part in each.weight_parts()]
    host, nbytes = engine.host_state, sum(part.nbytes for part in parts)
    shares = host.watch.taken() if host is not None and isinstance(host.watch, _Shares) else {}
    digest = Digest(engine.device, nbytes)
    for number, part in enumerate(parts):
        digest.add(part, shares.get(number))
    if host is not None and host.watch is None:
        host.watch = _Shares.of(held, nbytes)
    return digest.text()


class Digest:
    """Takes in one tensor after another.

    Small ones are put together first: kernels for each of thousands of experts take longer than reading them all.

    Args:
        device: where it is computed.
        nbytes: of all that will be added.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._room, self._filled = _room(nbytes), 0
        self._value = torch.zeros((), dtype=torch.int64, device=device)
        self._shares = torch.zeros((), dtype=torch.int64, device=device)
        self._lengths = 0
        self._together = torch.zeros(self._room, dtype=torch.uint8, device=device)
        self._coming: list[tuple[Tensor, Tensor]] = []
        self._factors = _factors(0, self._room // _WORD + 1, device)

    def add(self, values: Tensor, share: Tensor | None = None) -> None:
        """Take in the bits of (n,) values, each with its place; they may not be written to before `text`.

        Args:
            values: of any dtype.
            share: what `share_of` gave for them, in place of reading them.
        """
        values, size, taken = values.detach().contiguous().view(torch.uint8), values.nbytes, 0
        self._lengths = (self._lengths * _STEP + size + 1) % (1 << 64)
        if share is not None:
            self._shares = self._shares + share
        while taken < size:
            fits = min(size - taken, self._room - self._filled)
            if share is None:
                into = self._together[self._filled : self._filled + fits]
                self._coming.append((into, values if fits == size else values[taken : taken + fits]))
            self._filled, taken = self._filled + fits, taken + fits
            if self._filled == self._room:
                self._take_in()

    def text(self) -> str:
        """16 hexadecimal digits; nothing is added after it."""
        self._take_in()
        return f"{(int(self._value + self._shares) + self._lengths) % (1 << 64):016x}"

    def _take_in(self) -> None:
        if self._coming:
            # All in a few kernels where they are on the device.
            targets, sources = zip(*self._coming, strict=True)
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._value = self._value * _STEP + _found(self._together.view(torch.int64), self._factors)
        self._together.zero_()
        self._filled, self._coming = 0, []


def share_of(values: Tensor, start: int, nbytes: int) -> Tensor | None:
    """What tensors have in a digest, by which they need not be read when all is added.

    Args:
        values: of any dtype, contiguous.
        start: bytes that are added before them.
        nbytes: of all that is added.

    Returns:
        () int64 on their device; None for those that are no whole words where they lie.
    """
    room, bits = _room(nbytes), values.detach().view(-1).view(torch.uint8)
    if start % _WORD or bits.nbytes % _WORD or bits.storage_offset() % _WORD:
        return None
    words, chunks, place = bits.view(torch.int64), nbytes // room + 1, start
    share = torch.zeros((), dtype=torch.int64, device=values.device)
    while len(words):
        chunk, within = divmod(place, room)
        fits = min(len(words), (room - within) // _WORD)
        found = _found(words[:fits], _factors(within // _WORD, fits + 1, values.device))
        share = share + found * _signed(pow(_STEP, chunks - 1 - chunk, 1 << 64))
        words, place = words[fits:], place + fits * _WORD
    return share


class _Shares:
    """What of the master weights in host memory was taken in during the last update: `HostState.watch`."""

    def __init__(self, nbytes: int, places: dict[int, tuple[dict[str, Tensor], int, int]]) -> None:
        self._nbytes, self._places = nbytes, places
        self._shares: dict[int, Tensor] = {}

    @classmethod
    def of(cls, held: Sequence[HeldParameter], nbytes: int) -> _Shares | None:
        """For what a rank holds, of so many bytes; None where no optimizer has master weights in its state, or not yet.

        A place is the number of the part and the bytes before it, by the state that has it.
        """
        places, number, start = {}, 0, 0
        for each in held:
            parts = each.weight_parts()
            if each.optimizer is not None and _MASTER in each.moments:
                state = each.moments  # the last of its parts is the master weight
                before = start + sum(part.nbytes for part in parts[:-1])
                places[id(state)] = (state, number + len(parts) - 1, before)
            number, start = number + len(parts), start + sum(part.nbytes for part in parts)
        return cls(nbytes, places) if places else None

    def __call__(self, state: dict[str, Tensor]) -> None:
        """Take in a parameter's master weight, which is on the device and has been updated."""
        known, number, start = self._places.get(id(state), (None, 0, 0))
        if known is state:
            share = share_of(state[_MASTER], start, self._nbytes)
            if share is not None:
                self._shares[number] = share

    def taken(self) -> dict[int, Tensor]:
        """By the number of the part: those of the last update, once."""
        taken, self._shares = self._shares, {}
        return taken


def _room(nbytes: int) -> int:
    """Bytes that are taken in at a time, whole words."""
    return max(1, -(-min(nbytes, _CHUNK) // _WORD)) * _WORD


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """Of words from this place of a chunk on."""
    return (torch.arange(first, first + count, device=device) * _SPREAD).bitwise_or_(1)


def _found(words: Tensor, factors: Tensor) -> Tensor:
    """(n,) words of a chunk and n + 1 factors -> ()."""
    # All of it modulo 2^64, where a factor moves bits up only: upper halves are multiplied on their own too.
    return (words * factors[:-1]).addcmul_(words >> 32, factors[1:]).sum()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
