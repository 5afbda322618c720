"""The critic's loss, and how well it predicts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.whitening import Moments, moments
from hybridflow.algorithms.checks import check_shapes
from hybridflow.algorithms.losses.aggregation import masked_column
from hybridflow.algorithms.losses.statistics import Statistics, total
from hybridflow.metrics.names import CRITIC, CriticNames

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    clip: float | None,
    names: CriticNames = CRITIC,
) -> tuple[Tensor, Statistics]:
    """Compute these tokens' part of the critic's loss, and their statistics.

        loss = sum_t weight_t / 2 * max((V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2)

    without the second term if `clip` is None. So a value that has already moved by more than `clip` towards its return
    gets no gradient. The clipping is that of PPO's implementation (arXiv:1707.06347); see also Engstrom et al.,
    arXiv:2005.12729.

    All tensors have one shape, any shape: (B, S') or packed (T,). `values` are those of the critic being trained and
    carry the gradient; `old_values` are those that the `returns` of `gae_advantages` were made with. `weights` come
    from `sequence_weights` over the whole mini-batch; a token of weight 0 contributes nothing, whatever its other
    columns hold, nan included. `names` are those of the statistics. Returns a float32 scalar (if every weight is 0, a
    zero through which gradients of zero flow) and the statistics. Raises ValueError for a column of another shape than
    `weights`.
    """
    values = masked_column("value_loss", "values", values, weights)
    old_values = masked_column("value_loss", "old_values", old_values, weights)
    returns = masked_column("value_loss", "returns", returns, weights)
    error = (values - returns).square()
    clipped = torch.zeros_like(error, dtype=torch.bool)
    if clip is not None:
        clipped_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        clipped = clipped_error > error
        error = torch.maximum(error, clipped_error)
    loss = (0.5 * error * weights).sum()
    count = total(weights > 0)
    means = {
        names.clip_fraction: clipped,
        names.value_mean: values,
        names.return_mean: returns,
    }
    return loss, Statistics(
        {names.value_loss: total(loss)}, {name: (total(column), count) for name, column in means.items()}
    )


@dataclass(frozen=True)
class ValueMoments:
    """The moments of returns, and of what the values leave of them: R - V."""

    returns: Moments
    residuals: Moments


def value_moments(values: Tensor, returns: Tensor, mask: Tensor) -> ValueMoments:
    """Compute the moments of the tokens under the mask, taken in float64. All tensors have one shape, any shape.

    `values` are those that the returns were made with. Raises ValueError for tensors of other shapes.
    """
    check_shapes("value_moments", values=values, returns=returns, mask=mask)
    residuals = returns.to(torch.float64) - values.to(torch.float64)
    return ValueMoments(moments(returns, mask), moments(residuals, mask))


def explained_variance(shards: Iterable[ValueMoments]) -> float:
    """Compute the share of the returns' variance that the values account for, over the tokens of all shards of a batch.

        1 - Var(R - V) / Var(R)

    1 is perfect, 0 no better than a constant; nan where the returns do not vary.
    """
    shards = list(shards)
    variance = Moments.merge(shard.returns for shard in shards).variance
    if not variance:
        return math.nan
    return 1 - Moments.merge(shard.residuals for shard in shards).variance / variance
