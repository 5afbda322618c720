"""Fewer points that look the same: of each bucket the mean, the lowest and the highest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridflow.report.run_data import Floats

BUCKETS = 300
"""A plot is about twice as many pixels wide."""


@dataclass(frozen=True)
class Buckets:
    """Neighbouring points as one.

    Args:
        x: (m,), the mean of the bucket.
        mean, low, high: (m,), of the finite values of the bucket; nan where it has none.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def is_long(x: Floats) -> bool:
    """Whether there are more points than a plot can show."""
    return len(x) > 2 * BUCKETS


def bucketed(x: Floats, y: Floats, buckets: int = BUCKETS) -> Buckets:
    """The points in so many buckets, as equal in size as can be.

    Args:
        x, y: (n,), in the order of x, with n at least `buckets`.
    """
    bounds = np.linspace(0, len(x), buckets + 1).astype(int)
    firsts, sizes = bounds[:-1], np.diff(bounds)
    is_finite = np.isfinite(y)
    count = np.add.reduceat(is_finite, firsts, dtype=np.float64)
    empty = count == 0

    def reduced(reduce: np.ufunc, of_others: float) -> Floats:
        values: Floats = reduce.reduceat(np.where(is_finite, y, of_others), firsts)
        return np.where(empty, np.nan, values)

    return Buckets(
        x=np.add.reduceat(x, firsts) / sizes,
        mean=reduced(np.add, 0.0) / np.where(empty, 1.0, count),
        low=reduced(np.minimum, np.inf),
        high=reduced(np.maximum, -np.inf),
    )
