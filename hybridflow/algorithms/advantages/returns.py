"""Discounted sums of per-token rewards over the tokens that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.gae import gae_advantages

if TYPE_CHECKING:
    from torch import Tensor


def discounted_returns(token_rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Compute the discounted sum of the rewards from each token on.

        G_t = sum_{l >= 0} gamma^l r_{t+l}

    t counts the tokens in the mask only. That is generalized advantage estimation without a critic: values of 0 and
    lambda 1, whose shapes, result and errors these are. Source: REINFORCE++, arXiv:2501.03262, with gamma = 1.
    """
    advantages, _ = gae_advantages(token_rewards, torch.zeros_like(token_rewards), response_mask, gamma=gamma, lam=1.0)
    return advantages
