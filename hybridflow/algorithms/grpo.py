"""Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300): advantages of a batch, loss of a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow import metrics
from hybridflow.algorithms.advantages import group_relative_advantages
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.kl import kl_estimate, subtract_kl_from_rewards
from hybridflow.algorithms.policy_loss import clipped_policy_loss
from hybridflow.algorithms.statistics import Statistics
from hybridflow.batch import RolloutBatch


def grpo_advantages(batch: RolloutBatch, config: AlgorithmConfig) -> Tensor:
    """(B, S') float32 advantages of a batch with rewards; whole groups must be in it.

    With kl_in "reward" the KL penalty is subtracted from the rewards first and `ref_logprobs` are needed; it is
    estimated with the trainer's `old_logprobs` where present, else with those of the rollout. Raises ValueError for a
    missing column.
    """
    if batch.rewards is None:
        raise ValueError("grpo_advantages: the batch has no rewards")
    rewards = batch.rewards
    if config.needs_reference and config.kl_in == "reward":
        if batch.ref_logprobs is None:
            raise ValueError("grpo_advantages: kl_coef > 0 with kl_in 'reward', and the batch has no ref_logprobs")
        logprobs = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
        kl = kl_estimate(logprobs, batch.ref_logprobs, config.kl_estimator)
        rewards = subtract_kl_from_rewards(rewards, kl, batch.response_mask, config.kl_coef)
    return group_relative_advantages(
        rewards, batch.group_ids, batch.response_mask, normalise_by_std=config.normalise_advantages_by_std
    )


def grpo_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    config: AlgorithmConfig,
    old_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """The part of the loss that these tokens contribute, and their statistics.

        loss = sum_t weight_t * (policy_loss_t + kl_coef * kl_t - entropy_coef * entropy_t)

    with the clipped surrogate of `clipped_policy_loss` and, for kl_in "loss", `kl_estimate` against the reference. All
    tensors have one shape, any shape: (B, S') or packed (T,). `weights` come from `token_weights` over the whole
    mini-batch, so the losses of all micro-batches and ranks add up to the loss of the mini-batch. A token of weight 0
    (prompt, padding) contributes nothing, whatever its other columns hold, nan included.

    `logprobs` and `entropy` are of the policy being trained and carry the gradient. `old_logprobs` are of the policy
    before the first update of the step; None says that no update has happened since the rollout, so that they are
    `logprobs` themselves and the ratio is exactly 1. `rollout_logprobs` only serve to measure how far the two engines
    differ on the same weights, so they are compared with `old_logprobs`.

    Returns a float32 scalar (if every weight is 0, a zero through which gradients of zero flow) and the statistics.
    Raises ValueError for a column that `config` needs and that is not given, or whose shape differs.
    """
    if entropy is None and config.entropy_coef > 0:
        raise ValueError("grpo_loss: entropy_coef > 0 needs entropy")
    uses_reference = config.needs_reference and config.kl_in == "loss"
    if ref_logprobs is None and uses_reference:
        raise ValueError("grpo_loss: kl_coef > 0 with kl_in 'loss' needs ref_logprobs")
    counted = weights > 0

    def masked(name: str, column: Tensor) -> Tensor:
        if column.shape != weights.shape:
            raise ValueError(f"grpo_loss: {name} has shape {tuple(column.shape)}, weights {tuple(weights.shape)}")
        return column.float().where(counted, 0.0)

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
    count = _total(counted)
    sums = {metrics.TRAIN_POLICY_LOSS: _total(policy.loss * weights)}
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
        kl = kl_estimate(logprobs, masked("ref_logprobs", ref_logprobs), config.kl_estimator)
        means[metrics.TRAIN_REFERENCE_KL] = kl
        if uses_reference:
            token_loss = token_loss + config.kl_coef * kl
    if entropy is not None:
        entropy = masked("entropy", entropy)
        means[metrics.TRAIN_ENTROPY] = entropy
        token_loss = token_loss - config.entropy_coef * entropy
    if rollout_logprobs is not None:
        difference = (masked("rollout_logprobs", rollout_logprobs) - old_logprobs).abs()
        means[metrics.MISMATCH_LOGPROB_MEAN] = difference
        # -inf where nothing is counted: `max` of an empty tensor is an error, and 0 would be a claim.
        maxima[metrics.MISMATCH_LOGPROB_MAX] = torch.cat(
            [difference.detach().where(counted, -torch.inf).flatten(), difference.new_full((1,), -torch.inf)]
        ).max()
    loss = (token_loss * weights).sum()
    sums[metrics.TRAIN_LOSS] = _total(loss)
    return loss, Statistics(
        sums,
        {name: (_total(column), count) for name, column in means.items()},
        {name: value.to(torch.float64) for name, value in maxima.items()},
    )


def _total(column: Tensor) -> Tensor:
    return column.detach().sum(dtype=torch.float64)
