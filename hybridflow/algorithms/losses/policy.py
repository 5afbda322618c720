"""The loss of a policy: what all algorithms share, around the loss of a token that each names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.losses.aggregation import masked_column
from hybridflow.algorithms.losses.kl import PENALTY_LIMIT, kl_estimate, kl_penalty, value_of
from hybridflow.algorithms.losses.statistics import Statistics, total
from hybridflow.algorithms.segments import segment_reduce
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN_LOGPROBS = "chosen_logprobs"
"""One of the others: log-probs of `chosen_tokens` from the policy that is trained, which carry the gradient."""


@dataclass(frozen=True)
class TokenColumns:
    """Columns of a policy loss, one value a token of a micro-batch, all of whose sequences are complete.

    All columns have one shape: packed (T,), or (B, S'), but some of the others, which have K values of each token: (T,
    K), or (B, S', K). They are 0 where a token does not count.

    Args:
        logprobs: float32 of the policy that is trained; carries the gradient.
        old_logprobs: float32 of the policy that the ratio is to.
        advantages: float32.
        loss_mask: bool, the tokens that the policy wrote.
        sequences: int64 number of each token's sequence within the micro-batch; None where no loss asks for it.
        others: columns that only some losses read, by name.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sequences: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def column(self, name: str) -> Tensor:
        """Return a further column. Raises ValueError if it was not given."""
        if name not in self.others:
            raise ValueError(f"policy loss: no column {name}, which the loss needs")
        return self.others[name]


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token, and what made it. All columns have the shape of the tokens' own.

    Args:
        loss: float32; the only one with a gradient.
        ratio: float32: pi(token) / pi_old(token), or what the loss has in its place.
        stats: further columns whose mean over the loss tokens is a metric, by its name.
    """

    loss: Tensor
    ratio: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLossFunction = Callable[[TokenColumns, Any], PolicyLoss]
"""(columns, settings of the algorithm) -> the loss of each token. An algorithm names one: `Algorithm.policy_loss`."""


def sequence_sums(column: Tensor, tokens: TokenColumns) -> Tensor:
    """Sum a column over the loss tokens of each sequence: (K,), differentiable, the same bits on every run.

    Raises ValueError if the tokens do not say which sequences they are of.
    """
    if tokens.sequences is None:
        raise ValueError("sequence_sums: no column sequences, which numbers the sequence of each token")
    masked = column.where(tokens.loss_mask, 0.0).flatten()
    return segment_reduce(masked, torch.bincount(tokens.sequences.flatten()))  # tokens of a sequence are adjacent


def sequence_means(column: Tensor, tokens: TokenColumns) -> Tensor:
    """Compute for each token the mean of a column over its sequence's loss tokens; 0 where there are none.

    As `sequence_sums`.
    """
    sums = sequence_sums(column, tokens)
    numbers = sequence_sums(torch.ones_like(column), tokens).clamp(min=1)
    assert tokens.sequences is not None
    return (sums / numbers)[tokens.sequences.flatten()].view_as(column)


def policy_gradient_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    config: AlgorithmSettings,
    policy_loss: PolicyLossFunction,
    sequences: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    correction_weights: Tensor | None = None,
    **others: Tensor,
) -> tuple[Tensor, Statistics]:
    """Compute these tokens' part of the loss, and their statistics.

        loss = sum_t weight_t * (correction_t * policy_loss_t + kl_coef * kl_t - entropy_coef * entropy_t)

    with the algorithm's `policy_loss` and, for kl_in "loss", `kl_penalty` against the reference. All tensors have one
    shape, any shape: (B, S') or packed (T,), and `sequences` says which tokens belong together. `weights` come from
    `sequence_weights` over the whole mini-batch, so the losses of all micro-batches and ranks add up to the loss of the
    mini-batch. A token of weight 0 (prompt, padding) contributes nothing, whatever its other columns hold, nan
    included.

    `correction_weights` are those of `algorithm.correction`, 1 if None. They weigh the policy loss alone, as in verl:
    the KL divergence from the reference and the entropy keep every token. So do the `weights`: a token that the
    correction leaves out still counts in what the loss is divided by, as in IcePop (arXiv:2510.18855); verl's rejection
    divides by the tokens that are left.

    `logprobs` and `entropy` are of the policy being trained and carry the gradient; with an entropy_coef of 0 the
    entropy is only measured. `old_logprobs` are of the policy before the first update of the step, or of an older one
    that has made the samples; None says that no update has happened since the rollout, so that they are `logprobs`
    themselves and the ratio is exactly 1. `rollout_logprobs` only serve to measure how far the two engines differ on
    the same weights, so they are compared with `old_logprobs`. `others` are columns that only this loss reads.

    Returns a float32 scalar (if every weight is 0, a zero through which gradients of zero flow) and the statistics.
    Raises ValueError for a column that `config` needs and that is not given, or whose shape differs.
    """
    if entropy is None and config.entropy_coef > 0:
        raise ValueError("policy_gradient_loss: entropy_coef > 0 needs entropy")
    uses_reference = config.needs_reference and config.kl_in == "loss"
    if ref_logprobs is None and uses_reference:
        raise ValueError("policy_gradient_loss: kl_coef > 0 with kl_in 'loss' needs ref_logprobs")
    loss_mask = weights > 0

    def masked(name: str, column: Tensor) -> Tensor:
        return masked_column("policy_gradient_loss", name, column, weights)

    logprobs = masked("logprobs", logprobs)
    old_logprobs = logprobs.detach() if old_logprobs is None else masked("old_logprobs", old_logprobs)
    columns = TokenColumns(
        logprobs,
        old_logprobs,
        masked("advantages", advantages),
        loss_mask,
        sequences,
        {name: masked(name, column) for name, column in others.items()},
    )
    policy = policy_loss(columns, config)
    token_loss = policy.loss
    if correction_weights is not None:
        token_loss = token_loss * masked("correction_weights", correction_weights)
    count = total(loss_mask)
    sums = {metrics.TRAIN_POLICY_LOSS: total(token_loss * weights)}
    means = {
        metrics.TRAIN_RATIO: policy.ratio.where(loss_mask, 0.0),
        **policy.stats,
        metrics.TRAIN_KL_K1: kl_estimate(old_logprobs, logprobs, "k1"),
        metrics.TRAIN_KL_K3: kl_estimate(old_logprobs, logprobs, "k3"),
    }
    maxima = {}
    if ref_logprobs is not None:
        kl = kl_penalty(logprobs, masked("ref_logprobs", ref_logprobs), config.kl_estimator)
        means[metrics.TRAIN_REFERENCE_KL] = kl
        if value_of(config.kl_estimator) == "k3":
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
        maxima[metrics.MISMATCH_LOGPROB_MAX] = _maximum(difference.detach(), loss_mask)
    loss = (token_loss * weights).sum()
    sums[metrics.TRAIN_LOSS] = total(loss)
    return loss, Statistics(
        sums,
        {name: (total(column), count) for name, column in means.items()},
        {name: value.to(torch.float64) for name, value in maxima.items()},
    )


def _maximum(column: Tensor, mask: Tensor) -> Tensor:
    """Largest value of a column where the mask is True; -inf where it never is, since 0 would be a claim."""
    none = column.new_full((1,), -torch.inf)  # `max` of an empty tensor is an error
    return torch.cat([column.where(mask, -torch.inf).flatten(), none]).max()
