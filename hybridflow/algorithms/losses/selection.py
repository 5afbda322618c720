"""Selection of the first tokens of a mini-batch in an order, where no process has all of them.

Every token has a key: a rank, the id of its sample, and its number in the response. No two are equal, so the
first tokens are the same for any sharding. Each shard names its first tokens, as many as are selected in all. The last
of the first tokens of all shards is the limit. Each shard then selects its tokens within the limit.
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
    """Sort keys of N tokens, (N,) each. The lowest rank comes first; of equal ranks, the lowest id and number.

    Args:
        ranks: float64.
        sample_ids: int64.
        tokens: int64 numbers within the response.
    """

    ranks: npt.NDArray[np.float64]
    sample_ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    def first(self, count: int) -> Keys:
        """Return the first `count` keys in order; all if there are fewer."""
        order = np.lexsort((self.tokens, self.sample_ids, self.ranks))[:count]
        return self.take(order)

    def take(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Keys:
        """Select some keys."""
        return Keys(self.ranks[chosen], self.sample_ids[chosen], self.tokens[chosen])

    def within(self, limit: SelectionLimit | None) -> npt.NDArray[np.bool_]:
        """Return (N,) bool: True for keys that do not come after a limit; all False without a limit."""
        if limit is None:
            return np.zeros(len(self.ranks), dtype=bool)
        same_sample = self.sample_ids == limit.sample_id
        before = (self.sample_ids < limit.sample_id) | (same_sample & (self.tokens <= limit.token))
        within: npt.NDArray[np.bool_] = (self.ranks < limit.rank) | ((self.ranks == limit.rank) & before)
        return within


@dataclass(frozen=True)
class SelectionLimit:
    """The key of the last token that is chosen."""

    rank: float
    sample_id: int
    token: int

    @classmethod
    def of(cls, shards: Sequence[Keys], count: int) -> SelectionLimit | None:
        """Compute the limit within which the first `count` of all shards are; None if there are none.

        `shards` have the first `count` of each.
        """
        names = ("ranks", "sample_ids", "tokens")
        first = Keys(*(np.concatenate([getattr(shard, name) for shard in shards]) for name in names)).first(count)
        if not len(first.ranks):
            return None
        return cls(float(first.ranks[-1]), int(first.sample_ids[-1]), int(first.tokens[-1]))


def share_of(fraction: float, count: int) -> int:
    """Return the number of tokens of a fraction of `count`: rounded down, and at least 1 of any.

    The fraction is the decimal that was written: 0.29 of 100 is 29, which a product of floats is not.
    """
    return min(max(int(Fraction(str(fraction)) * count), 1), count)


def uniform_ranks(salt: int, sample_ids: Tensor, tokens: Tensor) -> npt.NDArray[np.float64]:
    """Return (N,) pseudo-random ranks in [0, 1) that depend on the salt, the token's sample and its number alone.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) of one after the other.
    """
    state = np.full(len(sample_ids), salt, dtype=np.int64).view(np.uint64)
    for column in (sample_ids, tokens):
        state = _mixed(state) + column.numpy().astype(np.int64).view(np.uint64)
    return (_mixed(state) >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float64) * 2.0**-_MANTISSA_BITS


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _ODD
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * factor
    return state ^ (state >> np.uint64(31))


def token_numbers(lengths: Tensor) -> Tensor:
    """Return (R,) int64: the number of each token within its response, for (B,) responses end to end."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(len(starts)) - starts
