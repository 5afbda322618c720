"""Samples dealt to ranks so that each has about as much to compute."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np


def even_ranges(count: int, parts: int) -> list[range]:
    """`count` items as `parts` consecutive ranges, whose sizes differ by one at most."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Deal out the indices of `costs` into `parts` lists of near equal total cost; how many each holds may differ.

    By the largest differencing method over several parts (Karmarkar and Karp 1982, "The differencing method of set
    partitioning"), unless dealing from the largest down to the smallest total so far ends lower. So the largest total
    is at most 4/3 - 1 / (3 * parts) times the least possible one (Graham 1969, "Bounds on multiprocessing timing
    anomalies"); of some hundred samples to a few parts it is within a percent of the mean, unless one sample alone is
    larger. Deterministic; every list holds at least one index, in ascending order.

    Raises:
        ValueError: fewer costs than parts, or one that is not a finite number above 0.
    """
    values = np.asarray(costs, np.float64)
    if not 1 <= parts <= len(values):
        raise ValueError(f"balance: {len(values)} samples for {parts} parts, expected at least one for each")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        raise ValueError(f"balance: sample {wrong[0]} costs {values[wrong[0]]}, expected a finite number above 0")
    dealt = min(
        (_differenced(values, parts), _largest_first(values, parts)),
        key=lambda part_of: np.bincount(part_of, values).max(),
    )
    return [np.flatnonzero(dealt == part).tolist() for part in range(parts)]


def _largest_first(costs: np.ndarray, parts: int) -> np.ndarray:
    """The part of each item, where each goes to the part with the smallest total so far."""
    part_of = np.empty(len(costs), np.int64)
    totals = [(0.0, part) for part in range(parts)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, part = totals[0]
        part_of[item] = part
        heapq.heapreplace(totals, (total + costs[item], part))
    return part_of


def _differenced(costs: np.ndarray, parts: int) -> np.ndarray:
    """The part of each item, by largest differencing.

    Every item begins as a partition of its own, into itself and nothing. The two partitions that are least even are
    joined, the largest part of one with the smallest of the other, until one is left. As long as a partition has an
    empty part it has no part of two items, so that none is empty in the end.
    """
    count = len(costs)
    totals = {item: np.concatenate(([costs[item]], np.zeros(parts - 1))) for item in range(count)}
    least_even = [(float(sums[-1] - sums[0]), item) for item, sums in totals.items()]
    heapq.heapify(least_even)
    joined: list[tuple[int, int, np.ndarray]] = []
    while len(least_even) > 1:
        (_, first), (_, second) = heapq.heappop(least_even), heapq.heappop(least_even)
        sums = totals.pop(first) + totals.pop(second)[::-1]
        falling = np.argsort(-sums, kind="stable")
        number = count + len(joined)
        joined.append((first, second, falling))
        totals[number] = sums = sums[falling]
        heapq.heappush(least_even, (float(sums[-1] - sums[0]), number))
    # Back from the whole to single items: the final part of each part of each partition.
    final = {least_even[0][1]: np.arange(parts)}
    for number in reversed(range(len(joined))):
        first, second, falling = joined[number]
        mine = np.empty(parts, np.int64)
        mine[falling] = final.pop(count + number)
        final[first], final[second] = mine, mine[::-1]
    return np.array([final[item][0] for item in range(count)])
