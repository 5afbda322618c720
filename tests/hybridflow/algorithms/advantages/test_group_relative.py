"""Advantages of whole responses: of groups, and against a greedy baseline."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybridflow.algorithms.advantages.group_relative import (
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    remax_advantages,
    valid_group_advantages,
)


def advantages(rewards: list[float], groups: list[int], *, std: bool = True) -> list[float]:
    result = group_relative_advantages(torch.tensor(rewards), torch.tensor(groups), normalise_by_std=std)
    assert result.dtype == torch.float32
    return result.tolist()


def test_group_advantages_by_hand() -> None:
    # Group 4: mean 0.5, sample standard deviation sqrt(1/3); group 9: mean 2, standard deviation sqrt(2).
    rewards, groups = [1.0, 3.0, 0.0, 1.0, 1.0, 0.0], [4, 9, 4, 9, 4, 4]
    assert advantages(rewards, groups, std=False) == [0.5, 1.0, -0.5, -1.0, 0.5, -0.5]
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.0 / (math.sqrt(2.0) + 1e-6)
    assert advantages(rewards, groups) == pytest.approx([a, b, -a, -b, a, -a], rel=1e-6)


@pytest.mark.parametrize("std", [True, False])
def test_groups_that_say_nothing_get_exactly_zero(std: bool) -> None:
    assert advantages([0.1, 0.1, 0.1, 7.0], [1, 1, 1, 2], std=std) == [0.0, 0.0, 0.0, 0.0]
    torch.manual_seed(0)
    for size, reward in enumerate(torch.rand(40).tolist(), start=1):
        assert advantages([reward] * size, [3] * size, std=std) == [0.0] * size


def test_group_advantages_against_the_standard_library_in_any_order() -> None:
    torch.manual_seed(0)
    groups = torch.tensor([group for group, size in enumerate((1, 2, 3, 8, 5)) for _ in range(size)])
    rewards = torch.rand(len(groups))
    expected = []
    for reward, group in zip(rewards.tolist(), groups.tolist(), strict=True):
        members = [other for other, of in zip(rewards.tolist(), groups.tolist(), strict=True) if of == group]
        std = statistics.stdev(members) if len(members) > 1 else 1.0
        expected.append((reward - statistics.fmean(members)) / (std + 1e-6))
    for _ in range(5):
        order = torch.randperm(len(groups))
        got = advantages(rewards[order].tolist(), (groups[order] * 1000 + 17).tolist())
        assert got == pytest.approx([expected[index] for index in order], rel=1e-5, abs=1e-7)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="reward of row 1 is nan, expected a finite number"):
        advantages([0.0, float("nan")], [1, 1])


def test_a_group_is_exactly_what_is_left_of_it_in_the_batch() -> None:
    torch.manual_seed(3)
    rewards = torch.rand(12)
    groups = torch.tensor([70, 70, 70, 70, 71, 71, 71, 71, 72, 72, 72, 72])  # one prompt, drawn three times
    # Of group 70 one sample was filtered, of 71 three failed, and samples of 72 came late, between the others.
    left = [8, 3, 5, 10, 0, 9, 1, 11]
    got = dict(zip(left, advantages(rewards[left].tolist(), groups[left].tolist()), strict=True))
    for group in ([0, 1, 3], [5], [8, 9, 10, 11]):
        members = [float(rewards[sample]) for sample in group]
        std = statistics.stdev(members) if len(members) > 1 else 1.0
        for sample, reward in zip(group, members, strict=True):
            assert got[sample] == pytest.approx((reward - statistics.fmean(members)) / (std + 1e-6), rel=1e-5)
    assert got[5] == 0.0


# RLOO, OPO and GPG

WHOLE = [70, 70, 70, 70, 71, 71, 71, 71, 72, 72, 72, 72]
LEFT = [8, 3, 5, 10, 0, 9, 1, 11]
"""Samples that remain: one of group 70 was filtered, three of 71 failed, and samples of 72 came late, between the
others.
"""


def test_leave_one_out_advantages_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 7.0, 5.0]), torch.tensor([4, 9, 4, 2, 4])
    result = leave_one_out_advantages(rewards, groups)
    assert result.tolist() == [1.0 - 2.5, 0.0, 0.0 - 3.0, 0.0, 5.0 - 0.5]  # groups of one have no baseline
    assert result.dtype == torch.float32


def test_leave_one_out_is_of_what_is_left_of_a_group() -> None:
    torch.manual_seed(3)
    rewards, groups = torch.rand(12), torch.tensor(WHOLE)
    got = dict(zip(LEFT, leave_one_out_advantages(rewards[LEFT], groups[LEFT]).tolist(), strict=True))
    for group in ([0, 1, 3], [8, 9, 10, 11]):
        for sample in group:
            others = [float(rewards[other]) for other in group if other != sample]
            assert got[sample] == pytest.approx(float(rewards[sample]) - statistics.fmean(others), rel=1e-5)
    assert got[5] == 0.0


def test_a_left_out_reward_has_no_part_in_its_own_baseline() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 8.0]), torch.zeros(3, dtype=torch.int64)
    first = float(leave_one_out_advantages(rewards, groups)[0])
    moved = float(leave_one_out_advantages(rewards + torch.tensor([10.0, 0.0, 0.0]), groups)[0])
    assert moved == first + 10.0


def test_length_weighted_advantages_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 7.0]), torch.tensor([4, 9, 4, 9])
    result = length_weighted_advantages(rewards, torch.tensor([3, 5, 1, 0]), groups)
    assert result.tolist() == [1.0 - 0.75, 0.0, 0.0 - 0.75, 4.0]
    assert result.dtype == torch.float32
    # Of one length they are GRPO's without the standard deviation.
    same = length_weighted_advantages(rewards, torch.full((4,), 11), groups)
    assert same.tolist() == advantages(rewards.tolist(), groups.tolist(), std=False)


def test_length_weighted_is_of_what_is_left_of_a_group() -> None:
    torch.manual_seed(4)
    rewards, lengths, groups = torch.rand(12), torch.randint(1, 900, (12,)), torch.tensor(WHOLE)
    result = length_weighted_advantages(rewards[LEFT], lengths[LEFT], groups[LEFT]).tolist()
    got = dict(zip(LEFT, result, strict=True))
    for group in ([0, 1, 3], [8, 9, 10, 11]):
        total = sum(int(lengths[sample]) for sample in group)
        baseline = sum(int(lengths[sample]) * float(rewards[sample]) for sample in group) / total
        assert [got[sample] for sample in group] == pytest.approx(
            [float(rewards[sample]) - baseline for sample in group], rel=1e-4
        )
    assert got[5] == 0.0


def test_the_length_weighted_baseline_has_the_least_variance() -> None:
    # Of gradients whose squared norms are the lengths: b minimises sum_j l_j (r_j - b)^2.
    rewards, lengths = torch.tensor([0.0, 1.0, 0.3, 0.9]), torch.tensor([10, 2, 7, 1])
    groups = torch.zeros(4, dtype=torch.int64)
    best = float(rewards[0] - length_weighted_advantages(rewards, lengths, groups)[0])
    variances = [float((lengths * (rewards - (best + shift)).square()).sum()) for shift in (0.0, -0.05, 0.05)]
    assert min(variances) == variances[0]


def test_a_group_without_a_counted_token_gets_zero() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    assert length_weighted_advantages(torch.tensor([1.0, 2.0]), zeros, zeros).tolist() == [0.0, 0.0]


def test_valid_group_advantages_by_hand() -> None:
    # Of seven samples, four are in the one group whose rewards differ.
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 7.0, 0.0]), torch.tensor([4, 9, 4, 9, 4, 2, 4])
    result, share = valid_group_advantages(rewards, groups)
    assert share == pytest.approx(4 / 7)
    centred = torch.tensor([0.75, 0.0, -0.25, 0.0, -0.25, 0.0, -0.25])
    torch.testing.assert_close(result, centred * 7 / 4)
    assert result.dtype == torch.float32


def test_without_a_valid_group_nothing_is_scaled() -> None:
    result, share = valid_group_advantages(torch.tensor([0.1, 0.1, 0.7]), torch.tensor([1, 1, 2]))
    assert (result.tolist(), share) == ([0.0, 0.0, 0.0], 0.0)


def test_valid_groups_are_of_what_is_left_of_them() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]), torch.tensor([1, 1, 1, 2, 2, 2, 3, 3])
    left = [7, 0, 3, 1, 4]  # the wrong one of group 1 failed, and so on: no group that is left differs
    assert valid_group_advantages(rewards[left], groups[left])[1] == 0.0
    left = [5, 0, 2, 6, 3]
    result, share = valid_group_advantages(rewards[left], groups[left])
    assert share == pytest.approx(4 / 5)
    torch.testing.assert_close(result, torch.tensor([0.5, 0.5, -0.5, 0.0, -0.5]) * 5 / 4)


def test_equal_rewards_give_exactly_zero_with_every_baseline() -> None:
    torch.manual_seed(0)
    for size, reward in enumerate(torch.rand(40).tolist(), start=1):
        rewards, groups = torch.full((size,), reward), torch.full((size,), 3)
        lengths = torch.randint(1, 5000, (size,))
        assert leave_one_out_advantages(rewards, groups).tolist() == [0.0] * size
        assert length_weighted_advantages(rewards, lengths, groups).tolist() == [0.0] * size
        assert valid_group_advantages(rewards, groups)[0].tolist() == [0.0] * size


# ReMax


def test_remax_advantages_by_hand() -> None:
    result = remax_advantages(torch.tensor([1.0, 0.25, 5.0]), torch.tensor([0.5, 1.0, 1.0]))
    assert result.tolist() == [0.5, -0.75, 4.0]
    assert result.dtype == torch.float32


def test_remax_advantages_follow_their_rows_and_add_nothing_on_average() -> None:
    torch.manual_seed(0)
    rewards, baseline = torch.randn(9), torch.randn(9)
    full, order = remax_advantages(rewards, baseline), torch.randperm(9)
    assert torch.equal(remax_advantages(rewards[order], baseline[order]), full[order])
    # A baseline that does not depend on the sample leaves the policy gradient what it is: the sum over all actions of
    # p * grad log p * (r - b) is that of p * grad log p * r.
    logits, reward = torch.randn(6).double().requires_grad_(), torch.randn(6)
    advantages_ = remax_advantages(reward, torch.full((6,), 7.0))
    logprobs = logits.log_softmax(0)
    (plain,) = torch.autograd.grad((logprobs.exp() * reward).sum(), logits, retain_graph=True)
    (with_baseline,) = torch.autograd.grad((logprobs.exp().detach() * logprobs * advantages_).sum(), logits)
    torch.testing.assert_close(with_baseline, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "baseline", "message"),
    [
        ([0.0, math.inf], [0.0, 0.0], "the reward of row 1 is inf, expected a finite number"),
        ([0.0, 1.0], [math.nan, 0.0], "the baseline reward of row 0 is nan, expected a finite number"),
    ],
)
def test_remax_refuses_rewards_that_are_not_finite(rewards: list[float], baseline: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        remax_advantages(torch.tensor(rewards), torch.tensor(baseline))


def test_columns_that_would_be_broadcast_are_refused() -> None:
    rewards = torch.zeros(3)
    with pytest.raises(ValueError, match=r"remax_advantages: baseline_rewards has shape \(3, 1\), expected \(3,\)"):
        remax_advantages(rewards, rewards[:, None])
    with pytest.raises(ValueError, match=r"group_relative_advantages: group_ids has shape \(2,\), expected \(3,\)"):
        group_relative_advantages(rewards, torch.zeros(2, dtype=torch.int64), normalise_by_std=True)
    with pytest.raises(ValueError, match=r"length_weighted_advantages: lengths has shape \(3, 1\), expected \(3,\)"):
        length_weighted_advantages(rewards, torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
