"""The order of prompts: random, without end, and resumable at any point."""

from __future__ import annotations

import random
from collections.abc import Mapping

from engine3d.errors import UserError


class PromptSampler:
    """Draws indices of `count` prompts; every epoch is a permutation of all of them, made from (seed, epoch) alone.

    The whole state is one number, the prompts drawn so far. A draw that crosses the end of an epoch goes on in the
    next, so a batch may hold a prompt twice; what identifies a draw is `position`, not the index.
    """

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError(f"PromptSampler: {count} prompts, expected at least 1")
        self._count = count
        self._seed = seed
        self._position = 0
        self._permutation_of: tuple[int, list[int]] | None = None

    @property
    def position(self) -> int:
        """Prompts drawn so far, over all epochs: the identity of the next draw."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next draw belongs to, from 0."""
        return self._position // self._count

    def next(self, number: int) -> list[int]:
        """The indices of the next `number` prompts."""
        drawn = [self._at(position) for position in range(self._position, self._position + number)]
        self._position += number
        return drawn

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if self._permutation_of is None or self._permutation_of[0] != epoch:
            order = list(range(self._count))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._permutation_of = (epoch, order)
        return self._permutation_of[1][offset]

    def state_dict(self) -> dict[str, int]:
        """Everything a later `load_state_dict` needs to go on exactly here."""
        return {"count": self._count, "seed": self._seed, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken. Raises UserError if it was taken with another number of prompts or seed."""
        for name, own in (("count", self._count), ("seed", self._seed)):
            if state[name] != own:
                raise UserError(
                    f"the checkpoint's prompt order has {name} {state[name]}, this run's data {own}: expected the same"
                )
        self._position = state["position"]
