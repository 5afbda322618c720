"""Advantages of Pass@k training, by hand and over every set of k responses."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from hybridflow.algorithms.advantages.pass_at_k import pass_at_k_advantages


def advantages(right: list[bool], groups: list[int], k: int) -> list[float]:
    result, _ = pass_at_k_advantages(torch.tensor(right), torch.tensor(groups), k)
    assert result.dtype == torch.float32
    return result.tolist()


def over_all_sets(right: list[bool], k: int) -> list[float]:
    """Average GRPO's (reward - mean) / standard deviation over the sets that contain a response, for each response."""
    sets = list(itertools.combinations(range(len(right)), k))
    rewards = [float(any(right[response] for response in subset)) for subset in sets]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    scaled = [(reward - mean) / (std + 1e-6) for reward in rewards]
    return [
        statistics.fmean([value for subset, value in zip(sets, scaled, strict=True) if response in subset])
        for response in range(len(right))
    ]


def test_by_hand() -> None:
    # Two of four right, pairs: one pair of six has none. rho = 5/6, sigma = sqrt(5)/6; a wrong response is in three
    # pairs, one of them all wrong.
    sigma = math.sqrt(5) / 6 + 1e-6
    of_right, of_wrong = (1 / 6) / sigma, (1 / 6 - 1 / 3) / sigma
    assert advantages([True, False, False, True], [5, 5, 5, 5], 2) == pytest.approx(
        [of_right, of_wrong, of_wrong, of_right], rel=1e-6
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_they_are_means_over_all_sets(k: int) -> None:
    for size in range(k + 1, 9):
        for count in range(size + 1):
            right = [index < count for index in range(size)]
            assert advantages(right, [1] * size, k) == pytest.approx(over_all_sets(right, k), abs=1e-5), (size, count)


def test_groups_are_what_is_left_of_them_in_any_order() -> None:
    torch.manual_seed(0)
    groups = [3, 9, 3, 9, 3, 4, 9, 3, 8, 8, 3]  # of eight each once: five, three, one and two are left
    right = [True, False, False, True, False, True, False, True, True, False, False]
    result = dict(zip(range(11), advantages(right, groups, 2), strict=True))
    for group in (3, 9):
        members = [row for row, of in enumerate(groups) if of == group]
        expected = over_all_sets([right[row] for row in members], 2)
        assert [result[row] for row in members] == pytest.approx(expected, abs=1e-5)
    assert [result[row] for row in (5, 8, 9)] == [0.0, 0.0, 0.0]  # of k responses there is one set, of one none
    order = torch.randperm(11).tolist()
    shuffled = advantages([right[row] for row in order], [groups[row] for row in order], 2)
    assert shuffled == [result[row] for row in order]


def test_groups_that_say_nothing_get_exactly_zero() -> None:
    assert advantages([False] * 4 + [True] * 4, [1] * 4 + [2] * 4, 2) == [0.0] * 8
    assert advantages([True, True, True, False], [1] * 4, 2) == [0.0] * 4  # every pair has a right one


def test_large_groups_stay_numbers() -> None:
    right = torch.arange(4096) < 40
    result, passed = pass_at_k_advantages(right, torch.zeros(4096, dtype=torch.int64), 64)
    exact = 1 - math.comb(4096 - 40, 64) / math.comb(4096, 64)
    assert passed == pytest.approx(exact, rel=1e-12)
    assert float(result[0]) == pytest.approx((1 - exact) / math.sqrt(exact * (1 - exact)), rel=1e-5)
    assert float(result.double().sum()) == pytest.approx(0.0, abs=1e-3)


def test_the_share_of_sets_with_a_right_response_is_that_of_whole_groups() -> None:
    right, groups = torch.tensor([True, False, False, False, True]), torch.tensor([1, 1, 1, 2, 3])
    assert pass_at_k_advantages(right, groups, 2)[1] == pytest.approx(2 / 3)
    assert pass_at_k_advantages(right, groups, 1)[1] == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert pass_at_k_advantages(right, groups, 4)[1] is None


def test_what_is_asked_of_the_columns() -> None:
    with pytest.raises(ValueError, match=r"pass_at_k_advantages: the mask is torch\.float32, expected torch\.bool"):
        pass_at_k_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"group_ids has shape \(3,\), expected \(2,\)"):
        pass_at_k_advantages(torch.tensor([True, False]), torch.zeros(3, dtype=torch.int64), 1)
