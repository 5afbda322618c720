"""Policy losses that weigh a token by its ratio and clip no gradient away: CISPO's and SAPO's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_shapes
from hybridflow.algorithms.losses.kl import LOG_RATIO_LIMIT
from hybridflow.algorithms.losses.policy import TokenColumns

if TYPE_CHECKING:
    from torch import Tensor


def token_ratios(columns: TokenColumns) -> Tensor:
    """Compute pi(token) / pi_old(token) with its gradient. The log-ratio is clamped, see `LOG_RATIO_LIMIT`."""
    return (columns.logprobs - columns.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_weights(ratio: Tensor, *, low: float | None, high: float) -> Tensor:
    """Compute CISPO's importance weights, which carry no gradient.

        w = sg[clip(ratio, 1 - low, 1 + high)]      MiniMax-M1, arXiv:2506.13585, section 3.1

    Without a bound below where low is None.
    """
    return ratio.detach().clamp(None if low is None else 1 - low, 1 + high)


def weighted_log_likelihood(logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Compute loss = -w A log pi: REINFORCE with importance weights, for tensors of one shape. Raises ValueError for
    others.
    """
    check_shapes("weighted_log_likelihood", logprobs=logprobs, advantages=advantages, weights=weights)
    return -weights * advantages * logprobs


def soft_gate(ratio: Tensor, temperatures: Tensor) -> Tensor:
    """Compute SAPO's gate: what takes the ratio's place in the surrogate.

        f = 4 / tau * sigmoid(tau (ratio - 1))      arXiv:2511.20347, section 3

    Its slope, `gate_slope`, is 1 at a ratio of 1, and falls to 0 on either side the faster the larger tau is.
    `ratio` and `temperatures` have one shape. Raises ValueError for others.
    """
    check_shapes("soft_gate", ratio=ratio, temperatures=temperatures)
    return torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures


def gate_slope(ratio: Tensor, temperatures: Tensor) -> Tensor:
    """Compute the derivative of `soft_gate` by the ratio: 4 p (1 - p) with p = sigmoid(tau (ratio - 1)); without a
    gradient.
    """
    share = torch.sigmoid(temperatures * (ratio.detach() - 1))
    return 4 * share * (1 - share)
