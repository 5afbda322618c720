"""Sequences of the micro-batches of a pass, and the context-parallel ranks that have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import batched, chain, count

import numpy as np

Shares = tuple[tuple[int, ...], ...]
"""Indices of a micro-batch's sequences: those that each context-parallel rank has complete, or one share of sequences
that are split over all ranks."""

# The lowest limit of cost is then known to a thousandth of the span in which it can lie.
_HALVINGS = 10
_UNEVEN = 1.1
"""Most that a rank with complete sequences may have, over an even share.

Ranks that wait longer lose more than splits cost, which send keys and values, attend in short chunks, and pad.
"""


def padded_length(length: int, cp: int) -> int:
    """Positions of a sequence of `length` tokens: split over context-parallel ranks two chunks of one size for each."""
    return length if cp == 1 else -(-length // (2 * cp)) * 2 * cp


class MicroBatchPlan:
    """Sequences of micro-batches, of which the most costly costs little more than it must.

    Every sequence is in exactly one, and none of several sequences has more than max_tokens. Ranks with the same
    sequences get the same result.

    With context parallelism a sequence of more than `max_tokens / cp` is split over the ranks, with all others of its
    micro-batch. In other micro-batches each rank has complete sequences, of at most `max_tokens / cp` together. They
    are split all the same if a rank has more than `_UNEVEN` times an even share of their tokens or costs, and their
    padding leaves capacity for it.

    Args:
        lengths: tokens of each sequence.
        costs: of each, in any unit.
        max_tokens: most positions of a micro-batch of several sequences.
        cp: context-parallel ranks.
    """

    def __init__(self, lengths: Sequence[int], costs: Sequence[float], max_tokens: int, cp: int = 1) -> None:
        self._lengths, self._costs, self._max_tokens, self._cp = lengths, costs, max_tokens, cp
        self._padded = [padded_length(length, cp) for length in lengths]
        self._order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        self._long = [index for index in self._order if lengths[index] > max_tokens // cp]
        self._splits: dict[int, int] = {}  # micro-batches that are split, by the number of all

    @cached_property
    def least(self) -> int:
        """Fewest micro-batches that first-fit decreasing fills."""
        tokens = sum(min(length, self._max_tokens) for length in self._lengths)
        return next(number for number in count(-(-tokens // self._max_tokens)) if self._fits(number))

    def micro_batches(self, at_least: int = 1) -> list[Shares]:
        """Assign the sequences to `least` micro-batches, or to `at_least` if that is more.

        The most costly comes first: memory grows once, and ranks that wait for each other have micro-batches of similar
        cost at the same time. Where there are fewer sequences than micro-batches, the last are empty.
        """
        total = max(at_least, self.least)
        number = next(number for number in range(total, self.least - 1, -1) if self._fits(number))
        bins, of_ranks = self._balanced(number), self._ranks(number)
        complete = sorted(bins[:of_ranks], key=self._tokens, reverse=True)
        shares = [*map(self._shared, batched(complete, self._cp)), *((tuple(split),) for split in bins[of_ranks:])]
        shares += [((),) * self._cp] * (total - number)
        return sorted(shares, key=lambda of_ranks: self._cost(chain(*of_ranks)), reverse=True)

    def _shared(self, ranks: Sequence[Sequence[int]]) -> Shares:
        """The sequences of some ranks, or one share of all if a rank has too much."""
        of_all = tuple(sorted(chain(*ranks)))
        even = all(
            self._cp * max(map(amount, ranks)) <= _UNEVEN * amount(of_all) for amount in (self._tokens, self._cost)
        )
        has_capacity = sum(self._padded[index] for index in of_all) <= self._max_tokens
        return (of_all,) if has_capacity and not even else tuple(map(tuple, ranks))

    def _balanced(self, number: int) -> list[list[int]]:
        """Fill bins so that the slowest is hardly slower than it must be.

        The better of two results: each sequence in turn in the bin that takes least time so far; or first fit under the
        lowest limit of time at which all sequences fit (multifit: Coffman, Garey and Johnson 1978, "An application of
        bin-packing to multiprocessor scheduling").
        """

        def slowest(bins: Sequence[Sequence[int]]) -> float:
            of_ranks = self._ranks(number)
            times = [self._cost(indices) / (1 if at < of_ranks else self._cp) for at, indices in enumerate(bins)]
            return max(times, default=0.0)

        best = self._fill(number, math.inf)
        assert best is not None
        even = sum(self._costs) / (max(1, number) * self._cp)
        lowest, highest = max(max(self._costs, default=0.0) / self._cp, even), slowest(best)
        for _ in range(_HALVINGS):
            limit = (lowest + highest) / 2
            candidate = self._fill(number, limit)
            if candidate is None:
                lowest = limit
            else:
                best, highest = candidate, slowest(candidate)
        spread = self._fill(number, None)
        return spread if spread is not None and slowest(spread) <= highest else best

    def _fits(self, number: int) -> bool:
        return self._fill(number, math.inf) is not None

    def _fill(self, number: int, limit: float | None) -> list[list[int]] | None:
        """Put sequences, from the longest down, each into the first bin with capacity for it, or into the fastest.

        Bins are the ranks of micro-batches with complete sequences, and after them micro-batches that are split.

        Args:
            number: of micro-batches.
            limit: most time of a bin, of which the first is chosen; None for the one that takes least time so far.

        Returns:
            Ascending indices for each bin; None where a sequence fits nowhere.
        """
        of_ranks = self._ranks(number)
        sizes = [of_ranks, number - of_ranks // self._cp]
        bins: list[list[int]] = [[] for _ in range(sum(sizes))]
        if not bins:
            return None if self._order else []
        capacity = np.repeat([self._max_tokens // self._cp, self._max_tokens], sizes)
        speed = np.repeat([1, self._cp], sizes)
        tokens, spent = np.zeros(len(bins), np.int64), np.zeros(len(bins))
        for index in self._order:
            taken = np.where(speed == 1, self._lengths[index], self._padded[index])
            fits = tokens + taken <= capacity
            fits[of_ranks:] |= tokens[of_ranks:] == 0
            after = spent + self._costs[index] / speed
            if limit is None:
                best = int(np.where(fits, spent, math.inf).argmin())
            else:
                fits &= after <= limit
                best = int(fits.argmax())
            if not fits[best]:
                return None
            bins[best].append(index)
            tokens[best] += taken[best]
            spent[best] = after[best]
        return [sorted(indices) for indices in bins]

    def _ranks(self, number: int) -> int:
        """Ranks of those of some micro-batches that are not split.

        As few are split as have the long sequences with hardly more than an even share of the costs.
        """
        if self._cp == 1:
            return 0
        if number not in self._splits:
            self._splits[number] = self._fewest_split(number) if self._long else 0
        return self._cp * (number - self._splits[number])

    def _fewest_split(self, number: int) -> int:
        padded, costs = [self._padded[index] for index in self._long], [self._costs[index] for index in self._long]
        long, most = MicroBatchPlan(padded, costs, self._max_tokens), min(number, len(padded))
        even = sum(self._costs) / max(1, number)
        limit = max(_UNEVEN * even, *costs)  # no number of splits makes the most costly sequence cheaper
        for split in range(max(long.least, int(sum(costs) / limit)), most):
            if sum(costs[index] for index in long.micro_batches(split)[0][0]) <= limit:
                return split
        return most

    def _tokens(self, indices: Iterable[int]) -> int:
        return sum(self._lengths[index] for index in indices)

    def _cost(self, indices: Iterable[int]) -> float:
        return sum(self._costs[index] for index in indices)
