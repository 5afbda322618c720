"""The clipped surrogate of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_shapes
from hybridflow.algorithms.losses.kl import LOG_RATIO_LIMIT
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ClippedLoss:
    """The loss of each token and what made it. All of one shape; only `loss` carries a gradient."""

    loss: Tensor
    """Float."""
    ratio: Tensor
    """Float: pi(token) / pi_old(token)."""
    clipped_low: Tensor
    """Bool: negative advantage and ratio below 1 - clip_low: no gradient."""
    clipped_high: Tensor
    """Bool: positive advantage and ratio above 1 + clip_high: no gradient."""
    clipped_dual: Tensor
    """Bool: negative advantage and ratio above dual_clip: no gradient."""


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """Compute the clipped surrogate, as a loss to be made small, for tensors of any one shape.

    With ratio = exp(log pi - log pi_old) and A the advantage:

        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        loss =  min(loss, -dual_clip * A)  where A < 0, if dual_clip is given

    Sources: PPO, arXiv:1707.06347, eq. 7; two clip values: DAPO, arXiv:2503.14476, eq. 10; dual clip with a constant
    above 1: Ye et al., arXiv:1912.09729, eq. 5. The log-ratio is clamped, see `LOG_RATIO_LIMIT`.

    Raises ValueError for tensors of different shapes.
    """
    check_shapes("clipped_policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    negative = advantages < 0
    ratio = ratio.detach()
    clipped_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        surrogate = surrogate.where(~negative, torch.maximum(surrogate, dual_clip * advantages))
        clipped_dual = negative & (ratio > dual_clip)
    return ClippedLoss(
        loss=-surrogate,
        ratio=ratio,
        clipped_low=negative & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
        clipped_dual=clipped_dual,
    )


def clipped_loss(columns: TokenColumns, config: ClippedSettings) -> PolicyLoss:
    """Compute `clipped_policy_loss` with the bounds of the settings: the loss of PPO, GRPO and others."""
    clipped = clipped_policy_loss(
        columns.logprobs,
        columns.old_logprobs,
        columns.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    return PolicyLoss(clipped.loss, clipped.ratio, clip_stats(clipped))


def clip_stats(clipped: ClippedLoss) -> dict[str, Tensor]:
    """Return masks of the clipped tokens, by metric name."""
    return {
        metrics.TRAIN_CLIP_FRACTION_LOW: clipped.clipped_low,
        metrics.TRAIN_CLIP_FRACTION_HIGH: clipped.clipped_high,
        metrics.TRAIN_CLIP_FRACTION_DUAL: clipped.clipped_dual,
    }
