"""A number for the weights that a rank holds: the same for the same bits, and no others in all likelihood.

Cheap enough for every step: the weights are read once, as they lie and where they are, and nothing is gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine3d.checkpoint.state import held_parameters

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

_CHUNK = 1 << 24
"""Bytes at a time; three times as many are taken beside them."""
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
    digest = Digest(engine.device)
    for held in held_parameters(engine):
        for part in held.weight_parts():
            digest.add(part)
    return digest.text()


class Digest:
    """Takes in one tensor after another.

    Args:
        device: where it is computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._value = torch.zeros((), dtype=torch.int64, device=device)
        self._factors = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        """Take in the bits of (n,) values, each with its place."""
        for part in values.detach().contiguous().split(_CHUNK // values.element_size()):
            self._add(_words(part.to(self._value.device)), part.nbytes)

    def text(self) -> str:
        """16 hexadecimal digits."""
        return f"{int(self._value) % (1 << 64):016x}"

    def _add(self, words: Tensor, nbytes: int) -> None:
        if len(words) >= len(self._factors):
            places = torch.arange(len(words) + 1, device=self._value.device)
            self._factors = (places * _SPREAD).bitwise_or_(1)
        # All of it modulo 2^64, where a factor moves bits up only: upper halves are multiplied on their own too.
        count = len(words)
        found = (words * self._factors[:count]).addcmul_(words >> 32, self._factors[1 : count + 1]).sum()
        self._value = self._value * _STEP + found + nbytes


def _words(values: Tensor) -> Tensor:
    """(n,) values read as (ceil(bytes / 8),) int64, zeros behind the last."""
    rest = -values.nbytes % _WORD
    if rest:
        values = torch.cat((values, values.new_zeros(rest // values.element_size())))
    elif values.storage_offset() * values.element_size() % _WORD:
        values = values.clone()  # torch reads as wider words only what begins at one
    return values.view(torch.int64)
