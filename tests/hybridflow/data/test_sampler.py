"""The order of prompts of several sources, by weights that change and by measured pass rates."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.data.files.config import DifficultyConfig, WeightFrom
from hybridflow.data.sampler import PromptOrder, PromptSampler, SourceOrder


def order(
    sizes: Sequence[int], weights: Sequence[Any] = (), *, per_step: int = 1, seed: int = 3, **difficulty: float
) -> PromptOrder:
    """Sources a, b, ... of so many prompts; a weight is a number or pairs of step and weight."""
    sources, begin = [], 0
    for number, size in enumerate(sizes):
        given = weights[number] if weights else ()
        steps = given if isinstance(given, tuple) else ((1, given),)
        weight = tuple(WeightFrom(step=step, weight=share) for step, share in steps)
        sources.append(SourceOrder("abcdef"[number], begin, begin + size, weight))
        begin += size
    curriculum = DifficultyConfig(**difficulty) if difficulty else None
    return PromptOrder(begin, seed, tuple(sources), per_step, curriculum)


def shares(drawn: Sequence[int], given: PromptOrder) -> list[int]:
    """Counts of draws by source."""
    counts = Counter(next(s.label for s in given.sources if s.begin <= index < s.end) for index in drawn)
    return [counts[source.label] for source in given.sources]


# One source


def test_the_order_of_one_source_does_not_change_between_versions() -> None:
    # Checkpoints go on by the position alone: another order would be other prompts.
    expected = [6, 5, 2, 4, 7, 1, 3, 9, 8, 0, 0, 8, 4, 2, 9, 6, 1, 5, 3, 7, 3, 5, 1, 7, 6]
    assert PromptSampler(10, seed=5).next(25) == expected
    assert PromptOrder(10, 5).sampler().next(25) == expected
    assert order([10], seed=5).sampler().next(25) == expected
    assert order([10], [2.5], seed=5).sampler().next(25) == expected
    assert PromptSampler(7, seed=0).next(14) == [2, 3, 1, 0, 6, 5, 4, 2, 3, 5, 0, 4, 6, 1]


def test_the_state_of_one_source_is_its_position() -> None:
    sampler = PromptSampler(10, seed=5)
    sampler.next(7)
    assert sampler.state_dict() == {"count": 10, "seed": 5, "position": 7}
    # Of files, a checkpoint of the same prompts in memory goes on as well.
    other = order([10], seed=5).sampler()
    other.load_state_dict(sampler.state_dict())
    assert other.next(20) == sampler.next(20)


# Several sources


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights", [(1, 1, 1), (3, 2, 1), (0.7, 0.2, 0.1), (1, 0.001, 0.5), (5, 0, 1), (1e-7, 1, 1e-3), (1e9, 1, 3)]
)
def test_shares_are_those_of_the_weights_after_any_number_of_draws(weights: tuple[float, ...]) -> None:
    given = order([7, 5, 11], weights)
    drawn, counts = given.sampler().next(3000), [0, 0, 0]
    for position, index in enumerate(drawn, start=1):
        [number] = [number for number, source in enumerate(given.sources) if source.begin <= index < source.end]
        counts[number] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - position * weight / sum(weights)) < len(weights)


def test_shares_are_exact_over_a_whole_number_of_rounds() -> None:
    given = order([7, 5, 11], (3, 2, 1))
    for begin in range(0, 60, 6):
        assert shares(given.sampler().next(600)[begin : begin + 6], given) == [3, 2, 1]


def test_without_weights_every_prompt_is_drawn_once_an_epoch() -> None:
    given = order([7, 5, 11])
    drawn = given.sampler().next(23 * 4)
    for begin in range(0, len(drawn), 23):
        assert sorted(drawn[begin : begin + 23]) == list(range(23))


def test_a_small_source_has_its_share_beside_a_large_one() -> None:
    given = order([3, 4], (3, 1_000_000_000))
    sampler = given.sampler()
    sampler.next(1)
    state = sampler.state_dict()
    assert (state["taken.a"], state["taken.b"]) == (0, 1)
    assert (state["credit.a"], state["credit.b"]) == (3000, -3000)  # its turn comes


def test_each_source_has_epochs_of_its_own() -> None:
    given = order([4, 6], (1, 3))
    drawn = given.sampler().next(80)
    small, large = ([index for index in drawn if (index < 4) is first] for first in (True, False))
    assert all(sorted(small[begin : begin + 4]) == [0, 1, 2, 3] for begin in range(0, 20, 4))
    assert all(sorted(large[begin : begin + 6]) == list(range(4, 10)) for begin in range(0, 60, 6))
    # The order inside of a source depends on its name and the seed, not on what is drawn beside it.
    alone = [index for index in order([4, 6], (1, 1)).sampler().next(40) if index < 4]
    assert alone == small[: len(alone)]
    assert small != [index for index in order([4, 6], (1, 3), seed=4).sampler().next(80) if index < 4]


def test_weights_change_at_their_steps() -> None:
    weights = ((1, 1), (3, 0), (5, 3)), ((1, 0), (3, 1))
    given = order([7, 5], weights, per_step=4)
    steps = [given.sampler().next(32)[begin : begin + 4] for begin in range(0, 32, 4)]
    assert [shares(step, given) for step in steps] == [[4, 0]] * 2 + [[0, 4]] * 2 + [[3, 1]] * 4


def test_draws_do_not_depend_on_how_many_are_asked_for_at_a_time() -> None:
    given = order([7, 5, 11], (((1, 1), (4, 5)), ((1, 2), (6, 0)), 1), per_step=5)
    uninterrupted, sampler, generator = given.sampler().next(300), given.sampler(), random.Random(0)
    draws: list[int] = []
    while len(draws) < 300:
        draws += sampler.next(generator.randrange(1, 12))
    assert draws[:300] == uninterrupted


def test_a_resumed_sampler_goes_on_exactly_at_every_position() -> None:
    given = order([3, 5, 4], (((1, 1), (4, 5)), ((1, 2), (6, 0), (9, 1)), 0.3), per_step=4)
    uninterrupted, sampler = given.sampler().next(120), given.sampler()
    for position in range(100):
        state = json.loads(json.dumps(sampler.state_dict()))
        after = given.sampler()
        after.next(position % 7)
        after.load_state_dict(state)
        assert after.position == position
        assert after.next(20) == uninterrupted[position : position + 20]
        sampler.next(1)


def test_a_state_of_other_prompts_or_another_seed_is_refused() -> None:
    state = order([3, 5]).sampler().state_dict()
    with pytest.raises(UserError, match="has count 8, this run's data 9"):
        order([3, 6]).sampler().load_state_dict(state)
    with pytest.raises(UserError, match="has seed 3, this run's data 4"):
        order([3, 5], seed=4).sampler().load_state_dict(state)
    with pytest.raises(ValueError, match="0 prompts, expected at least 1"):
        PromptSampler(0, seed=1)


# By difficulty


def test_prompts_are_drawn_again_by_their_pass_rates() -> None:
    given = order([10], low=0.2, high=0.8, keep=0.0)
    sampler = given.sampler()
    assert sorted(sampler.next(10)) == list(range(10))
    sampler.measured({index: index / 10 for index in range(10)})
    for _ in range(3):
        assert sorted(sampler.next(7)) == [2, 3, 4, 5, 6, 7, 8]
    sampler.measured({2: 1.0, 9: 0.5})
    sampler.next(10)  # to the end of that epoch, at least
    assert set(sampler.next(70)) == {3, 4, 5, 6, 7, 8, 9}


def test_what_was_not_measured_is_drawn_and_no_rate_counts_without_difficulty() -> None:
    sampler = order([10], low=0.2, high=0.8, keep=0.0).sampler()
    sampler.next(10)
    sampler.measured({0: 0.0, 1: 1.0})
    assert sorted(sampler.next(8)) == list(range(2, 10))
    plain, measured = order([10]).sampler(), order([10]).sampler()
    measured.measured(dict.fromkeys(range(10), 0.0))
    assert measured.next(50) == plain.next(50)
    assert measured.state_dict() == plain.state_dict()


def test_a_share_of_the_others_is_drawn_all_the_same() -> None:
    sampler = order([1000], low=0.5, keep=0.2).sampler()
    sampler.next(1000)
    sampler.measured({index: float(index >= 500) for index in range(1000)})
    drawn = sampler.next(6000)
    easy = sum(index < 500 for index in drawn)
    assert 0.14 < easy / 6000 < 0.19  # a fifth of 500 beside the other 500
    assert len({index for index in drawn if index < 500}) > 400  # not always the same ones


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.5, 0.1, 0.01])
def test_a_few_prompts_that_are_all_too_hard_do_not_end_a_run(keep: float) -> None:
    for seed in range(20):
        sampler = order([3], seed=seed, low=0.5, keep=keep).sampler()
        sampler.next(3)
        sampler.measured({0: 0.0, 1: 0.0, 2: 0.0})
        assert set(sampler.next(10)) <= {0, 1, 2}


def test_no_prompt_that_could_be_drawn_again() -> None:
    sampler = order([2, 3], low=0.4, high=0.6, keep=0.0).sampler()
    sampler.next(5)
    sampler.measured({0: 0.5, 1: 0.5, 2: 0.1, 3: 1.0, 4: 0.0})
    with pytest.raises(UserError) as error:
        sampler.next(5)
    assert str(error.value) == (
        "data.files.difficulty: no prompt of b has a pass rate from 0.4 to 0.6, they are 0 to 1; expected other "
        "limits, or keep above 0"
    )


def test_a_curriculum_by_difficulty_resumes_at_every_position() -> None:
    given = order([6, 9], (2, 1), low=0.1, high=0.9, keep=0.3)
    generator = random.Random(2)
    rates = [{generator.randrange(15): generator.choice((0.0, 1 / 3, 1.0))} for _ in range(200)]

    def play(sampler: PromptSampler, begin: int, end: int) -> list[int]:
        drawn = []
        for position in range(begin, end):
            drawn += sampler.next(1)
            sampler.measured(rates[position])
        return drawn

    uninterrupted, sampler = play(given.sampler(), 0, 160), given.sampler()
    for position in range(120):
        after = given.sampler()
        after.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        assert play(after, position, position + 25) == uninterrupted[position : position + 25]
        assert after.epoch == after.position // 15
        play(sampler, position, position + 1)


def half_of_them_passed() -> PromptSampler:
    """Has drawn 14 of 10 prompts, of which those below 5 are no longer drawn since the tenth."""
    sampler = order([10], high=0.9, keep=0.0).sampler()
    sampler.next(10)
    sampler.measured({index: 1.0 if index < 5 else 0.5 for index in range(10)})
    sampler.next(4)
    return sampler


def test_returned_draws_come_first_with_their_numbers_and_nothing_else_changes() -> None:
    sampler = half_of_them_passed()
    state = json.loads(json.dumps(sampler.state_dict()))
    fresh = order([10], high=0.9, keep=0.0).sampler()
    fresh.load_state_dict(fresh.with_returned(state, {12: 7, 3: 1}))
    assert fresh.draw(1) == [(3, 1)]
    assert fresh.returned == [(12, 7)]
    again = order([10], high=0.9, keep=0.0).sampler()
    again.load_state_dict(fresh.with_returned(fresh.state_dict(), {13: 9}))
    expected = [(12, 7), (13, 9), *enumerate(sampler.next(40), start=14)]
    assert again.draw(42) == expected
    assert again.state_dict() == sampler.state_dict()


def test_a_sampler_is_forwarded_without_pass_rates() -> None:
    sampler = half_of_them_passed()
    after = order([10], high=0.9, keep=0.0).sampler()
    after.load_state_dict(sampler.forwarded(12))
    assert (after.position, set(after.next(30)), sampler.position) == (12, set(range(10)), 14)


def test_whose_state_it_is_says_the_count_and_the_seed() -> None:
    sampler = order([10], high=0.9, keep=0.0).sampler()
    assert sampler.is_of(half_of_them_passed().state_dict())
    assert not sampler.is_of(order([11]).sampler().state_dict())
    assert not sampler.is_of(order([10], seed=4).sampler().state_dict())
