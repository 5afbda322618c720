"""Advantages from one reward for each response: every token of a response gets the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.groups import groups_of
from hybridflow.algorithms.checks import check_finite, check_rows

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a standard deviation before it divides."""


def group_relative_advantages(rewards: Tensor, group_ids: Tensor, *, normalise_by_std: bool) -> Tensor:
    """Compute GRPO's advantages: each reward against the mean of its own group.

        A_i = (r_i - mean_g) / (std_g + 1e-6)    with normalise_by_std: DeepSeekMath, arXiv:2402.03300, section 4.1.2
        A_i =  r_i - mean_g                      without: Dr. GRPO, arXiv:2503.20783

    mean_g and std_g are taken over exactly the samples whose group id is that of i, wherever they stand in the batch;
    std_g is the sample standard deviation (n - 1 below the line). A group that has lost samples is a group of those
    that are left. A group in which all rewards are equal, and so every group of one, says nothing about which response
    is better: its advantages are exactly 0, and its tokens count in the loss like any others.

    Where public implementations differ: the paper does not say which standard deviation; n - 1 and 1e-6 are verl's
    (`compute_grpo_outcome_advantage`), TRL adds 1e-4. verl trains on the bare reward of a group of one.

    `rewards` (B,) float32, `group_ids` (B,) int64. Returns (B,) float32, computed in float64. Raises ValueError for a
    reward that is not finite, naming its row, and for columns of other shapes.
    """
    groups = groups_of("group_relative_advantages", rewards, group_ids)
    centred = rewards.to(torch.float64) - groups.of_samples(groups.means(rewards))
    if normalise_by_std:
        variance = groups.sums(centred.square()) / (groups.sizes() - 1).clamp(min=1)
        centred = centred / groups.of_samples(variance.sqrt() + STD_EPSILON)
    return centred.to(torch.float32)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Compute RLOO's advantages: each reward against the mean of the other rewards of its group.

        A_i = r_i - 1 / (n - 1) sum_{j != i} r_j  =  n / (n - 1) (r_i - mean_g)

    Sources: Ahmadian et al., arXiv:2402.14740; Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019).
    The baseline of a response does not depend on it, so it adds no bias. n is the number of samples that the group has
    in the batch.

    A group of one has no others, and so no baseline: its advantage is 0, as with GRPO, and its tokens count in the loss
    like any others. With the bare reward it would weigh by what its group has lost. Implementations differ: TRL and
    OpenRLHF cannot have such a group, verl's `rloo` trains on the bare reward and its `rloo_vectorized` gives 0 too.

    Arguments, result and errors as those of `group_relative_advantages`.
    """
    groups = groups_of("leave_one_out_advantages", rewards, group_ids)
    others = groups.of_samples(groups.sizes()) - 1
    reward = rewards.to(torch.float64)
    baseline = (groups.of_samples(groups.sums(reward)) - reward) / others.clamp(min=1)
    return (reward - baseline).where(others > 0, 0.0).to(torch.float32)


def turn_baselines(
    turns: Tensor, returns: Tensor, squares: Tensor, group_ids: Tensor, *, normalise_by_std: bool
) -> dict[int, tuple[float, float]]:
    """Compute mean and scale of each group's returns, over all turns of all its episodes.

        A_ik = (G_ik - mean_g) / (std_g + 1e-6)    with normalise_by_std, else the difference alone

    G_ik is the return of turn k of episode i. As in GRPO with process supervision (DeepSeekMath, arXiv:2402.03300,
    section 4.1.3) mean_g and std_g are over all turns of the group, each with the same weight; that adds up normalised
    rewards, where each turn more adds one below 0, and this normalises returns. std_g is the sample standard deviation.
    A group whose returns are all equal, and one of a single turn, has advantages of 0.

    Args:
        turns: (B,) float64: count of each episode's turns.
        returns: (B,) float64: sum of their returns.
        squares: (B,) float64: sum of the squares of these.
        group_ids: (B,) int64.
        normalise_by_std: divide by the standard deviation.

    Returns:
        Mean and scale, by group id.

    Raises:
        ValueError: a sum is not finite.
    """
    groups = groups_of("turn_baselines", returns, group_ids)
    counts, total = groups.sums(turns), groups.sums(returns)
    mean = total / counts.clamp(min=1)
    variance = (groups.sums(squares) - counts * mean.square()).clamp(min=0) / (counts - 1).clamp(min=1)
    scale = variance.sqrt() + STD_EPSILON if normalise_by_std else torch.ones_like(mean)
    of_groups = zip(group_ids.unique().tolist(), mean.tolist(), scale.tolist(), strict=True)
    return {group: (mean_g, scale_g) for group, mean_g, scale_g in of_groups}


def length_weighted_advantages(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Compute OPO's advantages: each reward against the mean of its group's rewards, weighed by the lengths of the
    responses.

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    Source: Hao et al., arXiv:2505.23585: the baseline of least variance is the mean of rewards weighed by the
    squared norms of the gradients of log pi(response), which are taken as proportional to the lengths. l_j are counted
    tokens, those that the policy wrote, which are the ones that have a gradient; the response j = i is part of the
    baseline.

    A group of one, like any group of equal rewards, gets exactly 0 (verl's `opo` trains on the bare reward of a group
    of one); so does a group without a loss token, from which nothing is learned.

    `lengths` (B,) int64; the other arguments, result and errors as those of `group_relative_advantages`.
    """
    groups = groups_of("length_weighted_advantages", rewards, group_ids)
    check_rows("length_weighted_advantages", rows=len(rewards), lengths=lengths)
    reward, weights = rewards.to(torch.float64), lengths.to(torch.float64)
    totals = groups.sums(weights)
    baseline = groups.of_samples(groups.sums(weights * reward) / totals.clamp(min=1))
    return (reward - baseline).where(groups.of_samples(totals) > 0, 0.0).to(torch.float32)


def valid_group_advantages(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, float]:
    """Compute GPG's advantages: each reward against the mean of its group, scaled up for groups of equal rewards.

        A_i = alpha (r_i - mean_g)        alpha = B / (B - M)

    B samples are in the batch, M of them in groups whose rewards are all equal (groups of one among these), which have
    no gradient: alpha makes the loss, a mean over all tokens or samples, one over those that have. Source: Chu et al.,
    arXiv:2504.02546, with F_norm = 1. The authors' code counts samples too, and adds 1e-5 to 1 / alpha; verl's
    `gpg` has the samples of a reward other than 0 in place of B - M, which is another number. Without any valid group
    alpha is 1, and all advantages are 0.

    Arguments and errors as those of `group_relative_advantages`. Returns the advantages, and the share of samples in
    groups whose rewards differ: 1 / alpha.
    """
    groups = groups_of("valid_group_advantages", rewards, group_ids)
    valid = groups.of_samples(groups.differ(rewards))
    share = float(valid.to(torch.float64).mean())
    centred = rewards.to(torch.float64) - groups.of_samples(groups.means(rewards))
    return (centred / (share or 1.0)).where(valid, 0.0).to(torch.float32), share


def remax_advantages(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """Compute ReMax's advantages: each reward against that of the greedy response to the same prompt.

        A_i = r_i - r(greedy response to the prompt of i)       Li et al., arXiv:2310.10505

    The baseline does not depend on the sample, so it adds no bias.

    Where a KL penalty is in the reward, r_i is less the KL divergence of the **whole** response, and every token of it
    gets that one value; other implementations (verl's `compute_remax_outcome_advantage`) give a token the divergence
    from it onwards. The gradient has the same expectation, since what came before a token does not depend on it, and
    more variance here. The greedy response carries no penalty.

    `rewards` and `baseline_rewards` (B,) float32, row by row of the same prompt. Returns (B,) float32. Raises
    ValueError for a reward that is not finite, naming its row, and for columns of other shapes.
    """
    check_rows("remax_advantages", rows=len(rewards), rewards=rewards, baseline_rewards=baseline_rewards)
    check_finite("advantages", "reward", rewards)
    check_finite("advantages", "baseline reward", baseline_rewards)
    return (rewards.to(torch.float64) - baseline_rewards.to(torch.float64)).to(torch.float32)
