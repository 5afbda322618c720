"""The clipped surrogate of PPO, and the loss around it that all algorithms share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.checks import check_shapes
from hybridflow.algorithms.losses.aggregation import counted_column
from hybridflow.algorithms.losses.kl import LOG_RATIO_LIMIT, PENALTY_LIMIT, kl_estimate, kl_penalty
from hybridflow.algorithms.losses.statistics import Statistics, total
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.metrics import names as metrics


@dataclass(frozen=True)
class PolicyLoss:
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
) -> PolicyLoss:
    """The clipped surrogate, as a loss to be made small, for tensors of any one shape.

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
    return PolicyLoss(
        loss=-surrogate,
        ratio=ratio,
        clipped_low=negative & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
        clipped_dual=clipped_dual,
    )


def policy_gradient_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    config: AlgorithmSettings,
    old_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """The part of the loss that these tokens contribute, and their statistics.

        loss = sum_t weight_t * (policy_loss_t + kl_coef * kl_t - entropy_coef * entropy_t)

    with the clipped surrogate of `clipped_policy_loss` and, for kl_in "loss", `kl_penalty` against the reference. All
    tensors have one shape, any shape: (B, S') or packed (T,). `weights` come from `sequence_weights` over the whole
    mini-batch, so the losses of all micro-batches and ranks add up to the loss of the mini-batch. A token of weight 0
    (prompt, padding) contributes nothing, whatever its other columns hold, nan included.

    `logprobs` and `entropy` are of the policy being trained and carry the gradient; with an entropy_coef of 0 the
    entropy is only measured. `old_logprobs` are of the policy before the first update of the step, or of an older one
    that has made the samples; None says that no update has happened since the rollout, so that they are `logprobs`
    themselves and the ratio is exactly 1. `rollout_logprobs` only serve to measure how far the two engines differ on
    the same weights, so they are compared with `old_logprobs`.

    Returns a float32 scalar (if every weight is 0, a zero through which gradients of zero flow) and the statistics.
    Raises ValueError for a column that `config` needs and that is not given, or whose shape differs.
    """
    if entropy is None and config.entropy_coef > 0:
        raise ValueError("policy_gradient_loss: entropy_coef > 0 needs entropy")
    uses_reference = config.needs_reference and config.kl_in == "loss"
    if ref_logprobs is None and uses_reference:
        raise ValueError("policy_gradient_loss: kl_coef > 0 with kl_in 'loss' needs ref_logprobs")
    counted = weights > 0

    def masked(name: str, column: Tensor) -> Tensor:
        return counted_column("policy_gradient_loss", name, column, weights)

    logprobs = masked("logprobs", logprobs)
    old_logprobs = logprobs.detach() if old_logprobs is None else masked("old_logprobs", old_logprobs)
    policy = clipped_policy_loss(
        logprobs,
        old_logprobs,
        masked("advantages", advantages),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    token_loss = policy.loss
    count = total(counted)
    sums = {metrics.TRAIN_POLICY_LOSS: total(policy.loss * weights)}
    means = {
        metrics.TRAIN_RATIO: policy.ratio.where(counted, 0.0),
        metrics.TRAIN_CLIP_FRACTION_LOW: policy.clipped_low,
        metrics.TRAIN_CLIP_FRACTION_HIGH: policy.clipped_high,
        metrics.TRAIN_CLIP_FRACTION_DUAL: policy.clipped_dual,
        metrics.TRAIN_KL_K1: kl_estimate(old_logprobs, logprobs, "k1"),
        metrics.TRAIN_KL_K3: kl_estimate(old_logprobs, logprobs, "k3"),
    }
    maxima = {}
    if ref_logprobs is not None:
        kl = kl_penalty(logprobs, masked("ref_logprobs", ref_logprobs), config.kl_estimator)
        means[metrics.TRAIN_REFERENCE_KL] = kl
        if config.kl_estimator == "k3":
            means[metrics.TRAIN_REFERENCE_KL_CAPPED] = kl >= PENALTY_LIMIT
        if uses_reference:
            token_loss = token_loss + config.kl_coef * kl
    if entropy is not None:
        entropy = masked("entropy", entropy)
        means[metrics.TRAIN_ENTROPY] = entropy
        if config.entropy_coef > 0:  # 0 times an entropy that is nan would be nan
            token_loss = token_loss - config.entropy_coef * entropy
    if rollout_logprobs is not None:
        difference = (masked("rollout_logprobs", rollout_logprobs) - old_logprobs).abs()
        means[metrics.MISMATCH_LOGPROB_MEAN] = difference
        # -inf where nothing is counted: `max` of an empty tensor is an error, and 0 would be a claim.
        maxima[metrics.MISMATCH_LOGPROB_MAX] = torch.cat(
            [difference.detach().where(counted, -torch.inf).flatten(), difference.new_full((1,), -torch.inf)]
        ).max()
    loss = (token_loss * weights).sum()
    sums[metrics.TRAIN_LOSS] = total(loss)
    return loss, Statistics(
        sums,
        {name: (total(column), count) for name, column in means.items()},
        {name: value.to(torch.float64) for name, value in maxima.items()},
    )
