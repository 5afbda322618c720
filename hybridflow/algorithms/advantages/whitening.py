"""Mean and variance of sharded columns, and whitening with them."""

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
    """0 of no value."""
    squared_deviations: float
    """The sum of the squared differences from the mean."""

    @property
    def variance(self) -> float:
        """The mean squared difference from the mean (n below the line); 0 of no value."""
        return self.squared_deviations / self.count if self.count else 0.0

    @staticmethod
    def merge(shards: Iterable[Moments]) -> Moments:
        """Merge the moments of shards. The result is the same to the last bit in any order of the shards.

            mean = sum_i n_i mean_i / n
            M    = sum_i (M_i + n_i (mean_i - mean)^2)

        Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
        (1979), for any number of shards. Nothing large is subtracted from something as large.
        """
        shards = [shard for shard in shards if shard.count]
        count = sum(shard.count for shard in shards)
        if not count:
            return Moments(0, 0.0, 0.0)
        # fsum rounds once, at the end, so order has no part in it.
        mean = math.fsum(shard.count * shard.mean for shard in shards) / count
        within = math.fsum(shard.squared_deviations for shard in shards)
        return Moments(count, mean, within + math.fsum(shard.count * (shard.mean - mean) ** 2 for shard in shards))


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Compute the moments of the values under the mask, taken in float64. Both tensors have one shape, any shape.

    Raises ValueError for a mask that is not boolean or of another shape.
    """
    check_mask("moments", mask)
    check_shapes("moments", values=values, mask=mask)
    selected = values.detach().to(torch.float64)[mask]
    if not selected.numel():
        return Moments(0, 0.0, 0.0)
    mean = selected.mean()
    return Moments(selected.numel(), mean.item(), (selected - mean).square().sum().item())


def sample_moments(values: Tensor, counts: Tensor) -> Moments:
    """Compute the moments over tokens of values that all loss tokens of a sample share.

    `values` (B,) float, `counts` (B,) int64: the loss tokens of each sample. Raises ValueError for columns of other
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
    """Whiten advantages to mean 0 and standard deviation 1 over all values of `moments`.

        (A - mean) / (sqrt(variance) + 1e-6)

    Where all are equal the result is 0. The usual normalisation of PPO's advantages (Andrychowicz et al.,
    arXiv:2006.05990), over the loss tokens of the whole batch: each shard is whitened with the merged moments of
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
