"""A number for the weights that a rank holds: the same for the same bits, and no others in all likelihood.

Cheap enough for every step: the float32 weights are read once, where they are, and nothing is gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine3d.checkpoint.state import held_parameters

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

_CHUNK = 1 << 21
"""Elements at a time, of which copies take some 50 MB."""
_SPREAD = -7046029254386353131
"""2^64 divided by the golden ratio, as int64: multiples of it look as if drawn at random."""
_STEP = 6364136223846793005
_WORDS = {1: torch.int8, 2: torch.int16}
"""What elements are read as, by their bytes; longer ones as several words of 32 bits."""


def weights_digest(engine: TrainEngine) -> str:
    """Of all that this rank holds: the master weights where it keeps some, in the order of the model's rules.

    A step of a run that is made again on the same layout has the same weights where every rank has the same digest.

    Returns:
        16 hexadecimal digits.
    """
    digest = Digest(engine.device)
    for held in held_parameters(engine):
        for offset in range(0, held.stop - held.start, _CHUNK):
            digest.add(held.read("weight", offset, min(_CHUNK, held.stop - held.start - offset)))
    return digest.text()


class Digest:
    """Takes in one tensor after another.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._value = torch.zeros((), dtype=torch.int64, device=device)
        self._factors = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        """Take in the bits of (n,) values, each with its place."""
        words = (
            values.detach().contiguous().view(_WORDS.get(values.element_size(), torch.int32)).to(torch.int64, copy=True)
        )
        if len(words) > len(self._factors):
            places = torch.arange(len(words), device=self._value.device)
            self._factors = (places * _SPREAD).bitwise_or_(1)
        words = words.to(self._value.device).mul_(self._factors[: len(words)])  # all of it modulo 2^64
        self._value = self._value * _STEP + words.sum() + len(words)

    def text(self) -> str:
        """16 hexadecimal digits."""
        return f"{int(self._value) % (1 << 64):016x}"
