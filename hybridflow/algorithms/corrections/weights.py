"""Importance weights of tokens that another policy has drawn, and which tokens are left out: functions of tensors.

With rho_t = pi(token) / mu(token), of the trained policy pi over the policy mu that drew, and the n counted
tokens of a response:

    token        rho_t
    sequence     prod_t rho_t
    geometric    (prod_t rho_t)^(1 / n)

    weight = min(ratio of the level `weights`, truncate)
             0 where the ratio of the level `mask` is below mask_low or above mask_high
             0 in all of a response with a token of rho_t < veto

Sources: weights of tokens, truncated (TIS): Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (2025). Beside a ratio to the proximal policy (decoupled PPO): Hilton et al., arXiv:2110.00641, and AReaL,
arXiv:2505.24298. Weights of sequences, truncated or masked (MIS): Liu et al., "When Speed Kills Stability: Demystifying
RL Collapse from the Training-Inference Mismatch" (2025). A mask of tokens on both sides, with the ratio as weight:
IcePop, arXiv:2510.18855. The geometric mean, and the veto: verl's rollout correction, there for leaving out alone.

Bounds hold before anything else: a ratio is compared with them in logarithms, and clamped only where it is raised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_mask, check_shapes
from hybridflow.algorithms.corrections.settings import CorrectionSettings, Level
from hybridflow.algorithms.losses.kl import LOG_RATIO_LIMIT
from hybridflow.algorithms.segments import segment_reduce

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Importance weights and masks of R response tokens of B samples.

    Args:
        weights: (R,) float32, factor of each token's policy loss; 0 outside the loss mask.
        truncated, low, high: (R,) bool, the loss tokens whose weight was truncated, and whose ratio is below and
            above the bounds of the mask.
        vetoed: (B,) bool.
    """

    weights: Tensor
    truncated: Tensor
    low: Tensor
    high: Tensor
    vetoed: Tensor


def sums_of(column: Tensor, lengths: Tensor) -> Tensor:
    """Sum (R,) values of each sample -> (B,) float64, independent of the other samples."""
    return segment_reduce(column.to(torch.float64), lengths)


def log_ratios(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return (R,) float64: log pi - log mu of each token, 0 outside the mask, whatever the columns hold there.

    Args:
        logprobs: (R,) of the policy that is to learn.
        sampled_logprobs: (R,) of the policy that drew.
        mask: (R,) bool, the tokens that it drew.

    Raises:
        ValueError: columns of different shapes.
    """
    check_shapes("log_ratios", dimensions=1, logprobs=logprobs, sampled_logprobs=sampled_logprobs, mask=mask)
    check_mask("log_ratios", mask)
    return (logprobs.to(torch.float64) - sampled_logprobs.to(torch.float64)).where(mask, 0.0)


def of_level(ratios: Tensor, mask: Tensor, lengths: Tensor, level: Level) -> Tensor:
    """Return (R,) float64: the logarithm of the ratio of a level that holds for each token.

    Args:
        ratios: (R,) as `log_ratios` gives them.
        mask: (R,) bool, the tokens that count.
        lengths: (B,) int64: tokens of each response.
        level: of the ratio.
    """
    if level == "token":
        return ratios
    of_samples = sums_of(ratios, lengths)
    if level == "geometric":
        of_samples = of_samples / sums_of(mask, lengths).clamp(min=1)
    return of_samples.repeat_interleave(lengths)


def correct(ratios: Tensor, mask: Tensor, lengths: Tensor, settings: CorrectionSettings) -> Correction:
    """Return the correction of R response tokens of B samples; see the module for the formulas.

    Args:
        ratios: (R,) as `log_ratios` gives them.
        mask: (R,) bool, the tokens that count.
        lengths: (B,) int64: tokens of each response.
        settings: of the correction.
    """
    none = torch.zeros_like(mask)
    weights, truncated, low, high = torch.ones_like(ratios), none, none, none
    if settings.weights is not None:
        of_tokens = of_level(ratios, mask, lengths, settings.weights)
        weights = _raised(of_tokens)
        if settings.truncate is not None:
            truncated = mask & (of_tokens > math.log(settings.truncate))
            weights = weights.clamp(max=settings.truncate)
    if settings.mask is not None:
        assert settings.mask_low is not None and settings.mask_high is not None
        of_tokens = of_level(ratios, mask, lengths, settings.mask)
        if settings.mask_low > 0:
            low = mask & (of_tokens < math.log(settings.mask_low))
        high = mask & (of_tokens > math.log(settings.mask_high))
    vetoed = torch.zeros(len(lengths), dtype=torch.bool)
    if settings.veto is not None:
        vetoed = sums_of(mask & (ratios < math.log(settings.veto)), lengths) > 0
    kept = mask & ~low & ~high & ~vetoed.repeat_interleave(lengths)
    return Correction(weights.where(kept, 0.0).to(torch.float32), truncated, low, high, vetoed)


def _raised(logarithms: Tensor) -> Tensor:
    return logarithms.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
