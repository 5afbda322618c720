"""The language-model loss of right responses that VAPO adds to its surrogate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_rows
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor


def positive_weights(rewards: Tensor, counts: Tensor, weights: Tensor, *, right_above: float) -> Tensor:
    """Compute the factor of each sample's negative log-likelihood per token, before the token's weight in the loss.

        c_i = 1 / (N_T * w_i)  for responses i of T, those with a reward above `right_above`; 0 for others

    N_T is the number of loss tokens of T in the mini-batch and w_i what a token of i weighs in its loss, so that
    sum(w * c * nll) is the mean negative log-likelihood over the tokens of T, whatever the aggregation of the rest:
    arXiv:2504.05118, section 4.3. 0 for all where T is empty.

    `rewards` and `weights` (B,) float32, `counts` (B,) int64: the loss tokens of each sample of the **whole**
    mini-batch over all data-parallel ranks. Returns (B,) float32, computed in float64. Raises ValueError for columns of
    other shapes.
    """
    check_rows("positive_weights", rows=len(rewards), rewards=rewards, counts=counts, weights=weights)
    right = (rewards > right_above) & (counts > 0)
    tokens = counts[right].sum().to(torch.float64)
    factors = (1 / (tokens * weights.to(torch.float64))).where(right, 0.0)
    return factors.to(torch.float32)


def with_positive_lm(policy: PolicyLoss, columns: TokenColumns, coefficient: float) -> PolicyLoss:
    """Add the language-model loss of right responses, whose column is `lm_weights`, to a policy loss.

        loss_t + coefficient * c_t * -log pi(token_t)

    Figures: the share of tokens that are of right responses, and their negative log-likelihood over all tokens, which
    divided by that share is its mean.
    """
    weights = columns.column("lm_weights")
    negative = -columns.logprobs
    right = weights > 0
    stats = {
        **policy.stats,
        metrics.TRAIN_POSITIVE_SHARE: right,
        metrics.TRAIN_POSITIVE_NLL: negative.detach().where(right, 0.0),
    }
    return replace(policy, loss=policy.loss + coefficient * weights * negative, stats=stats)
