"""Advantages from one reward for each response: every token of a response gets the same."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.checks import check_finite, check_rows

STD_EPSILON = 1e-6
"""Added to a standard deviation before it divides."""


def group_relative_advantages(rewards: Tensor, group_ids: Tensor, *, normalise_by_std: bool) -> Tensor:
    """GRPO's advantages: each reward against the mean of its own group.

        A_i = (r_i - mean_g) / (std_g + 1e-6)    with normalise_by_std: DeepSeekMath, arXiv:2402.03300, section 4.1.2
        A_i =  r_i - mean_g                      without: Dr. GRPO, arXiv:2503.20783

    mean_g and std_g are taken over exactly the samples whose group id is that of i, wherever they stand in the batch;
    std_g is the sample standard deviation (n - 1 below the line). A group that has lost samples is a group of those
    that are left. A group in which all rewards are equal, and so every group of one, says nothing about which response
    is better: its advantages are exactly 0, and its tokens count in the loss like any others.

    `rewards` (B,) float32, `group_ids` (B,) int64. Returns (B,) float32, computed in float64. Raises ValueError for a
    reward that is not finite, naming its row, and for columns of other shapes.
    """
    check_rows("group_relative_advantages", rows=len(rewards), rewards=rewards, group_ids=group_ids)
    check_finite("advantages", "reward", rewards)
    groups, member_of = group_ids.unique(return_inverse=True)
    # In float64 the sum of equal float32 rewards is exact, and so is their mean. An error of rounding, divided by
    # STD_EPSILON where the standard deviation is 0, would be an advantage.
    reward = rewards.to(torch.float64)
    zeros = reward.new_zeros(len(groups))
    counts = zeros.index_add(0, member_of, torch.ones_like(reward))
    mean = zeros.index_add(0, member_of, reward) / counts
    centred = reward - mean[member_of]
    if normalise_by_std:
        variance = zeros.index_add(0, member_of, centred.square()) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)[member_of]
    return centred.to(torch.float32)


def remax_advantages(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """ReMax's advantages: each reward against that of the greedy response to the same prompt.

        A_i = r_i - r(greedy response to the prompt of i)       Li et al., arXiv:2310.10505

    The baseline does not depend on the sample, so it adds no bias.

    Where a KL penalty is in the reward, r_i is less the KL divergence of the **whole** response, and every token of it
    gets that one figure; other implementations (verl's `compute_remax_outcome_advantage`) give a token the divergence
    from it onwards. The gradient has the same expectation, since what came before a token does not depend on it, and
    more variance here. The greedy response carries no penalty.

    `rewards` and `baseline_rewards` (B,) float32, row by row of the same prompt. Returns (B,) float32. Raises
    ValueError for a reward that is not finite, naming its row, and for columns of other shapes.
    """
    check_rows("remax_advantages", rows=len(rewards), rewards=rewards, baseline_rewards=baseline_rewards)
    check_finite("advantages", "reward", rewards)
    check_finite("advantages", "baseline reward", baseline_rewards)
    return (rewards.to(torch.float64) - baseline_rewards.to(torch.float64)).to(torch.float32)
