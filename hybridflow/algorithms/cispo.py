"""CISPO: GRPO that clips importance weights and no updates (MiniMax-M1, arXiv:2506.13585, section 3.1).

PPO's clipping takes the gradient from a token whose ratio has left the range, and the rare tokens at which a response
turns leave it first. Here every token keeps its gradient. Needs the roles that GRPO needs.

The paper has no bound from below and does not say the one from above; the default is that of verl's example
(`examples/cispo_trainer`). ScaleRL (arXiv:2510.13786) found that bounds up to a weight of 8 differ little.
"""

from __future__ import annotations

from pydantic import Field

from hybridflow.algorithms import grpo
from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.losses.weighted import clipped_weights, token_ratios, weighted_log_likelihood
from hybridflow.metrics import names as metrics


class CISPOSettings(grpo.GroupSettings):
    """Settings of CISPO."""

    name: str = "cispo"
    weight_clip_low: float | None = Field(default=None, gt=0, le=1)
    """The importance weight of a token is clipped from below at 1 - weight_clip_low; not at all when null."""
    weight_clip_high: float = Field(default=0.2, gt=0)
    """The importance weight of a token is clipped from above at 1 + weight_clip_high."""


def cispo_loss(columns: TokenColumns, config: CISPOSettings) -> PolicyLoss:
    """Compute loss = -sg[clip(ratio)] A log pi. The clipped shares are of weights, for either sign of the advantage."""
    ratio, low, high = token_ratios(columns), config.weight_clip_low, config.weight_clip_high
    weights = clipped_weights(ratio, low=low, high=high)
    loss = weighted_log_likelihood(columns.logprobs, columns.advantages, weights)
    stats = {metrics.TRAIN_CLIP_FRACTION_LOW: weights > ratio, metrics.TRAIN_CLIP_FRACTION_HIGH: weights < ratio}
    return PolicyLoss(loss, ratio.detach(), stats)


ALGORITHM = Algorithm(CISPOSettings, grpo.make_experience, grpo.with_advantages, grpo.learn, policy_loss=cispo_loss)
