"""Figures of evaluations against brute force and known values."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from hybridflow.metrics.evaluation_statistics import (
    ScoredResponse,
    estimates,
    figure_names,
    majority,
    over_prompts,
    pass_at,
    sizes,
    wilson,
    with_intervals,
)


def group(*rewards: float, votes: list[int | None] | None = None) -> list[ScoredResponse]:
    given = votes or [None] * len(rewards)
    return [ScoredResponse(reward, reward >= 1.0, vote) for reward, vote in zip(rewards, given, strict=True)]


@pytest.mark.parametrize("drawn", range(1, 8))
def test_pass_at_j_is_the_share_of_sets_of_j_responses_with_a_passing_one(drawn: int) -> None:
    for passing in range(drawn + 1):
        verdicts = [True] * passing + [False] * (drawn - passing)
        for j in range(1, drawn + 1):
            subsets = list(itertools.combinations(verdicts, j))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at(drawn, passing, j) == pytest.approx(share, abs=1e-12)
            assert share == pytest.approx(1 - math.comb(drawn - passing, j) / math.comb(drawn, j))


def test_pass_at_j_of_many_responses_does_not_overflow() -> None:
    exact = 1 - math.comb(900, 100) / math.comb(1000, 100)
    assert pass_at(1000, 100, 100) == pytest.approx(exact, rel=1e-12)
    assert pass_at(200, 1, 100) == pytest.approx(0.5)


@pytest.mark.parametrize(("drawn", "passing", "j"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (3, -1, 2)])
def test_what_cannot_be_estimated_is_refused(drawn: int, passing: int, j: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{j} of {drawn}"):
        pass_at(drawn, passing, j)


def test_sizes_are_powers_of_two_and_all_responses() -> None:
    assert [sizes(k) for k in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_the_most_frequent_vote_wins_and_of_ties_the_first_drawn() -> None:
    assert majority([5, 7, 7, 5, 7]) == 1
    assert majority([7, 5, 5, 7]) == 0
    assert majority([None, 5, 7, None]) == 1  # no answer is no vote, however many have none
    assert majority([None, None]) is None


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    for (passing, trials), (low, high) in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(passing, trials) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_a_mean_is_of_prompts_and_not_of_responses() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    estimate = over_prompts(values, proportion=True)
    error = statistics.stdev(values) / 2
    assert estimate.value == pytest.approx(0.4375)
    assert (estimate.low, estimate.high) == pytest.approx((0.4375 - 1.959964 * error, 0.4375 + 1.959964 * error))
    assert over_prompts([0.0, 0.0, 1.0], proportion=True).high == pytest.approx(wilson(1, 3)[1])
    assert over_prompts([3.0], proportion=False).low is None
    assert over_prompts([-1.0, 1.0], proportion=False).low == pytest.approx(-1.959964)  # no share: not cut at 0
    with pytest.raises(ValueError, match="no prompts"):
        over_prompts([], proportion=True)


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Prompts of different difficulty, 4 responses each: an interval over responses would cover far too seldom."""
    generator = random.Random(7)
    covered = 0
    for _ in range(400):
        groups = []
        for _ in range(60):
            chance = generator.choice((0.0, 1.0, 0.5))
            groups.append(group(*(float(generator.random() < chance) for _ in range(4))))
        estimate = estimates(groups, 4, votes=False)["mean@4"]
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 400 <= 0.98


def test_all_figures_of_two_prompts() -> None:
    groups = [group(1.0, 0.0, 0.5, 1.0, votes=[1, 2, 2, 1]), group(0.0, 0.0, 0.0, 2.0, votes=[None, 3, 3, 4])]
    by_name = estimates(groups, 4, votes=True)
    assert list(by_name) == figure_names(4, votes=True)
    assert {name: estimate.value for name, estimate in by_name.items()} == pytest.approx(
        {"reward_mean": (0.625 + 0.5) / 2, "mean@4": 0.375, "pass@1": 0.375, "pass@2": (5 / 6 + 0.5) / 2}
        | {"pass@4": 1.0, "maj@4": 0.5}
    )
    assert by_name["mean@4"].value == by_name["pass@1"].value
    assert {"pass@2_low", "pass@2", "pass@2_high"} <= with_intervals(by_name).keys()


def test_responses_without_a_score_are_left_out_and_are_not_wrong() -> None:
    groups = [group(1.0, 1.0), group(0.0), []]
    by_name = estimates(groups, 2, votes=True)
    assert by_name["mean@2"].value == 0.5 and by_name["mean@2"].prompts == 2
    assert by_name["pass@2"].value == 1.0 and by_name["pass@2"].prompts == 1
    with pytest.raises(ValueError, match="no prompts"):
        estimates([[], []], 2, votes=False)


def test_of_one_response_there_is_no_majority() -> None:
    assert figure_names(1, votes=True) == ["reward_mean", "mean@1", "pass@1"]
    assert list(estimates([group(1.0, votes=[1])], 1, votes=True)) == figure_names(1, votes=True)
