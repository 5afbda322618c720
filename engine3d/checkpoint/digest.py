"""A number for the weights that a rank holds: the same for the same bits, and no others in all likelihood.

Cheap enough for every step: each rank reads its weights once, as they lie, and asks no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine3d.checkpoint.state import held_parameters

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

_CHUNK = 1 << 25
"""Bytes at a time; four times as many are taken in all."""
_WORD = 8
"""Bytes that are multiplied at a time."""
_SPREAD = -7046029254386353131
"""2^64 divided by the golden ratio, as int64: multiples of it look as if drawn at random."""
_STEP = 6364136223846793005


def weights_digest(engine: TrainEngine) -> str:
    """Of all that this rank holds: the master weights where it keeps some, in the order of the model's rules.

    A step of a run that is made again on the same layout has the same weights where every rank has the same digest.

    Returns:
        16 hexadecimal digits.
    """
    parts = [part for held in held_parameters(engine) for part in held.weight_parts()]
    digest = Digest(engine.device, sum(part.nbytes for part in parts))
    for part in parts:
        digest.add(part)
    return digest.text()


class Digest:
    """Takes in one tensor after another.

    Small ones are put together first: kernels for each of thousands of experts take longer than reading them all.

    Args:
        device: where it is computed.
        nbytes: of all that will be added.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        words = -(-min(nbytes, _CHUNK) // _WORD)
        self._value = torch.zeros((), dtype=torch.int64, device=device)
        self._lengths = 0
        self._together = torch.empty(words * _WORD, dtype=torch.uint8, device=device)
        self._room, self._filled = words * _WORD, 0
        places = torch.arange(words + 1, device=device)
        self._factors = (places * _SPREAD).bitwise_or_(1)

    def add(self, values: Tensor) -> None:
        """Take in the bits of (n,) values, each with its place; they may not be written to before `text`."""
        values, size, taken = values.detach().contiguous().view(torch.uint8), values.nbytes, 0
        self._lengths = (self._lengths * _STEP + size + 1) % (1 << 64)
        while taken < size:
            fits = min(size - taken, self._room - self._filled)
            into = self._together[self._filled : self._filled + fits]
            into.copy_(values if fits == size else values[taken : taken + fits], non_blocking=True)
            self._filled, taken = self._filled + fits, taken + fits
            if self._filled == self._room:
                self._take_in()

    def text(self) -> str:
        """16 hexadecimal digits; nothing is added after it."""
        self._together[self._filled :].zero_()
        self._take_in()
        return f"{(int(self._value) + self._lengths) % (1 << 64):016x}"

    def _take_in(self) -> None:
        words = self._together.view(torch.int64)
        # All of it modulo 2^64, where a factor moves bits up only: upper halves are multiplied on their own too.
        found = (words * self._factors[:-1]).addcmul_(words >> 32, self._factors[1:]).sum()
        self._value = self._value * _STEP + found
        self._filled = 0
