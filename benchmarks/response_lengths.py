"""Lengths of responses as published, drawn by seed.

Figure 2a of Gao et al., "RollPacker: Mitigating Long-Tail Rollouts for Fast, Synchronous RL Post-Training" (NSDI 2026,
arXiv:2509.21009), is the cumulative distribution of response lengths of Qwen2.5-14B in three tasks, with at most 16k
tokens. The points below were read off the curves of the paper's own artifact (a vector graphic: to the token below 4.1k
tokens). The figure leaves out what is between 4.1k tokens and just below 16k; lengths are interpolated there.
"""

from __future__ import annotations

import bisect
import random

LONGEST = 16384
"""Tokens at which responses were cut off."""

PUBLISHED: dict[str, tuple[tuple[float, int], ...]] = {
    "math": (
        (0.001, 2),
        (0.01, 16),
        (0.05, 151),
        (0.1, 243),
        (0.2, 364),
        (0.3, 465),
        (0.4, 558),
        (0.5, 661),
        (0.6, 785),
        (0.7, 984),
        (0.75, 1129),
        (0.8, 1366),
        (0.85, 1758),
        (0.9, 2566),
        (0.92, 3074),
        (0.94, 3779),
        (0.9503, 4101),
        (0.99, LONGEST),
    ),
    "code": (
        (0.001, 126),
        (0.01, 195),
        (0.05, 286),
        (0.1, 349),
        (0.2, 443),
        (0.3, 517),
        (0.4, 590),
        (0.5, 663),
        (0.6, 748),
        (0.7, 864),
        (0.75, 945),
        (0.8, 1062),
        (0.85, 1263),
        (0.9, 1667),
        (0.92, 1952),
        (0.94, 2433),
        (0.95, 2815),
        (0.96, 3472),
        (0.971, 4110),
        (0.99, LONGEST),
    ),
    "judge": (
        (0.01, 6),
        (0.05, 12),
        (0.1, 91),
        (0.2, 242),
        (0.3, 341),
        (0.4, 432),
        (0.5, 520),
        (0.6, 607),
        (0.7, 702),
        (0.75, 755),
        (0.8, 826),
        (0.85, 914),
        (0.9, 1064),
        (0.92, 1161),
        (0.94, 1326),
        (0.95, 1422),
        (0.96, 1666),
        (0.97, 1984),
        (0.98, 2765),
        (0.985, 3549),
        (0.9919, 4103),
        (0.9982, LONGEST),
    ),
}
"""Shares of the responses, and the tokens that they have at most, by task. Other responses have `LONGEST` tokens."""


class Lengths:
    """Draws lengths; the same seed and names give the same lengths.

    Args:
        task: of `PUBLISHED`.
        seed: of all draws.
    """

    def __init__(self, task: str, seed: int) -> None:
        self._shares, self._tokens = zip(*((0.0, 1), *PUBLISHED[task]), strict=True)
        self._seed = seed

    def at(self, share: float) -> int:
        """Tokens that this share of the responses has at most."""
        index = bisect.bisect_left(self._shares, share)
        if index == len(self._shares):
            return LONGEST
        if index == 0:
            return int(self._tokens[0])
        left, right = self._shares[index - 1], self._shares[index]
        ratio = self._tokens[index] / self._tokens[index - 1]
        return round(self._tokens[index - 1] * ratio ** ((share - left) / (right - left)))

    def draw(self, *name: int) -> int:
        """Tokens of the response of this name."""
        return self.at(random.Random(f"{self._seed} {name}").random())

    @property
    def mean(self) -> float:
        """Tokens of a response in the mean."""
        return sum(self.at((index + 0.5) / 10000) for index in range(10000)) / 10000
