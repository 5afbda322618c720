"""Mean and variance of columns that lie in pieces, and whitening with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.group_relative import STD_EPSILON
from hybridflow.algorithms.checks import check_mask, check_shapes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Number, mean and spread of some values; all of them float64 at heart."""

    count: int
    mean: float
    """0 where nothing was counted."""
    squared_deviations: float
    """The sum of the squared differences from the mean."""

    @property
    def variance(self) -> float:
        """The mean squared difference from the mean (n below the line); 0 where nothing was counted."""
        return self.squared_deviations / self.count if self.count else 0.0

    @staticmethod
    def merge(pieces: Iterable[Moments]) -> Moments:
        """The moments of all values together, the same to the last bit in whatever order the pieces come.

            mean = sum_i n_i mean_i / n
            M    = sum_i (M_i + n_i (mean_i - mean)^2)

        Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
        (1979), for any number of pieces. Nothing large is subtracted from something as large.
        """
        pieces = [piece for piece in pieces if piece.count]
        count = sum(piece.count for piece in pieces)
        if not count:
            return Moments(0, 0.0, 0.0)
        # fsum rounds once, at the end, so order has no part in it.
        mean = math.fsum(piece.count * piece.mean for piece in pieces) / count
        within = math.fsum(piece.squared_deviations for piece in pieces)
        return Moments(count, mean, within + math.fsum(piece.count * (piece.mean - mean) ** 2 for piece in pieces))


def moments(values: Tensor, mask: Tensor) -> Moments:
    """The moments of the values under the mask, taken in float64. Both tensors have one shape, any shape.

    Raises ValueError for a mask that is not boolean or of another shape.
    """
    check_mask("moments", mask)
    check_shapes("moments", values=values, mask=mask)
    counted = values.detach().to(torch.float64)[mask]
    if not counted.numel():
        return Moments(0, 0.0, 0.0)
    mean = counted.mean()
    return Moments(counted.numel(), mean.item(), (counted - mean).square().sum().item())


def sample_moments(values: Tensor, counts: Tensor) -> Moments:
    """The moments over tokens of values that all counted tokens of a sample share.

    `values` (B,) float, `counts` (B,) int64: the counted tokens of each sample. Raises ValueError for columns of other
    shapes.
    """
    check_shapes("sample_moments", dimensions=1, values=values, counts=counts)
    value, count = values.to(torch.float64), counts.to(torch.float64)
    number = int(counts.sum())
    if not number:
        return Moments(0, 0.0, 0.0)
    mean = (count * value).sum() / number
    return Moments(number, mean.item(), (count * (value - mean).square()).sum().item())


def whiten(advantages: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over all that `moments` were taken of.

        (A - mean) / (sqrt(variance) + 1e-6)

    Where all are equal the result is 0. The usual normalisation of PPO's advantages (Andrychowicz et al.,
    arXiv:2006.05990), over the counted tokens of the whole batch: each piece is whitened with the merged moments of
    all. The variance has n below the line, as in OpenRLHF; verl's `masked_whiten` has n - 1 there, and 1e-8 in the
    variance. `advantages` (B, S') float32, `mask` (B, S') bool. Returns (B, S') float32, 0 outside the mask.
    Raises ValueError for a mask that is not boolean or of another shape, and for moments that are not finite.
    """
    check_mask("whiten", mask)
    check_shapes("whiten", advantages=advantages, mask=mask)
    if not (math.isfinite(moments.mean) and math.isfinite(moments.variance)):
        raise ValueError(
            f"whiten: advantages of mean {moments.mean} and variance {moments.variance}, expected finite numbers"
        )
    whitened = (advantages.to(torch.float64) - moments.mean) / (math.sqrt(moments.variance) + STD_EPSILON)
    return whitened.where(mask, 0.0).to(torch.float32)
