"""Which tokens of a mini-batch come first in an order, where no process holds all of them.

Every token has a key: a rank, the id of its sample, and its number in the response. No two are equal, so what comes
first is the same wherever the tokens lie. Each piece names as many of its own as can be wanted; the last of those that
come first in all pieces is the limit; each piece then knows which of its tokens are within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_MANTISSA_BITS = 53


@dataclass(frozen=True, eq=False)
class Keys:
    """Of N tokens, (N,) each: what comes first has the lowest rank; of equal ranks, the lowest id and number.

    Args:
        ranks: float64.
        sample_ids: int64.
        tokens: int64 numbers within the response.
    """

    ranks: npt.NDArray[np.float64]
    sample_ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    def first(self, count: int) -> Keys:
        """The first `count` of them, in order; all if there are fewer."""
        order = np.lexsort((self.tokens, self.sample_ids, self.ranks))[:count]
        return self.take(order)

    def take(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Keys:
        """Some of them."""
        return Keys(self.ranks[chosen], self.sample_ids[chosen], self.tokens[chosen])

    def within(self, limit: Limit | None) -> npt.NDArray[np.bool_]:
        """(N,) which of them do not come after a limit; none where there is no limit."""
        if limit is None:
            return np.zeros(len(self.ranks), dtype=bool)
        same_sample = self.sample_ids == limit.sample_id
        before = (self.sample_ids < limit.sample_id) | (same_sample & (self.tokens <= limit.token))
        found: npt.NDArray[np.bool_] = (self.ranks < limit.rank) | ((self.ranks == limit.rank) & before)
        return found


@dataclass(frozen=True)
class Limit:
    """The key of the last token that is chosen."""

    rank: float
    sample_id: int
    token: int

    @classmethod
    def of(cls, pieces: Sequence[Keys], count: int) -> Limit | None:
        """The limit within which the first `count` of all pieces are; None if there are none.

        `pieces` have the first `count` of each.
        """
        names = ("ranks", "sample_ids", "tokens")
        first = Keys(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names)).first(count)
        if not len(first.ranks):
            return None
        return cls(float(first.ranks[-1]), int(first.sample_ids[-1]), int(first.tokens[-1]))


def share_of(fraction: float, count: int) -> int:
    """How many of `count` tokens a fraction is: rounded down, and at least 1 of any.

    The fraction is the decimal that was written: 0.29 of 100 is 29, which a product of floats is not.
    """
    return min(max(int(Fraction(str(fraction)) * count), 1), count)


def uniform_ranks(salt: int, sample_ids: Tensor, tokens: Tensor) -> npt.NDArray[np.float64]:
    """(N,) ranks in [0, 1) that are as good as drawn, and are a token's own: of the salt, its sample and its number.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) of one after the other.
    """
    state = np.full(len(sample_ids), salt, dtype=np.int64).view(np.uint64)
    for part in (sample_ids, tokens):
        state = _mixed(state) + part.numpy().astype(np.int64).view(np.uint64)
    return (_mixed(state) >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float64) * 2.0**-_MANTISSA_BITS


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _ODD
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * factor
    return state ^ (state >> np.uint64(31))


def token_numbers(lengths: Tensor) -> Tensor:
    """(R,) int64: the number of each token within its response, for (B,) responses end to end."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(len(starts)) - starts
