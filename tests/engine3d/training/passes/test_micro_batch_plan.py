"""Micro-batches of similar cost, and the context-parallel ranks that have their sequences."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from engine3d.training.passes.micro_batch_plan import MicroBatchPlan, Shares, padded_length


def assign(lengths: list[int], costs: Sequence[float], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Micro-batches without context parallelism."""
    batches = MicroBatchPlan(lengths, costs, max_tokens).micro_batches(at_least)
    assert all(len(shares) == 1 for shares in batches)
    return [list(shares[0]) for shares in batches]


def least_micro_batches(lengths: list[int], max_tokens: int) -> int:
    return MicroBatchPlan(lengths, flops(lengths), max_tokens).least


def flops(lengths: list[int]) -> list[float]:
    """FLOPs of a model in which attention over 20 tokens costs as much as everything else."""
    return [length * (20.0 + length) for length in lengths]


def most_costly(costs: list[float], batches: list[list[int]]) -> float:
    return max(sum(costs[index] for index in batch) for batch in batches)


def least_possible(lengths: list[int], max_tokens: int, count: int) -> float:
    """Cost of the most costly micro-batch in the best of all assignments."""
    costs = flops(lengths)
    least = math.inf
    for choice in itertools.product(range(count), repeat=len(lengths)):
        batches = [[index for index, chosen in enumerate(choice) if chosen == number] for number in range(count)]
        if all(len(batch) < 2 or sum(lengths[index] for index in batch) <= max_tokens for batch in batches):
            least = min(least, most_costly(costs, batches))
    return least


@pytest.mark.parametrize("seed", range(20))
def test_assign_covers_every_sequence_once_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 50) for _ in range(draw.randint(0, 40))]
    costs, at_least = flops(lengths), draw.randint(1, 12)
    batches = assign(lengths, costs, 40, at_least)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(batches) == max(at_least, least_micro_batches(lengths, 40))
    for batch in batches:
        assert batch == sorted(batch)
        assert len(batch) <= 1 or sum(lengths[index] for index in batch) <= 40
    assert batches == sorted(batches, key=lambda batch: -sum(costs[index] for index in batch))
    assert batches == assign(lengths, costs, 40, at_least)


def test_as_few_micro_batches_as_first_fit_fills() -> None:
    assert least_micro_batches([], 9) == 0
    assert least_micro_batches([10, 30, 10], 9) == 3  # longer sequences are alone
    assert least_micro_batches([3, 5, 3, 4, 3], 9) == 2  # 5 + 4, 3 + 3 + 3
    assert least_micro_batches([1, 9, 1], 9) == 2


def test_asking_for_more_micro_batches_splits_those_there_are() -> None:
    batches = assign([3, 3, 3, 3], [3, 3, 3, 3], 12, at_least=3)
    assert len(batches) == 3 and sum(map(len, batches)) == 4 and all(batches)
    assert assign([], [], 12, at_least=2) == [[], []]
    assert assign([2, 7], [2, 7], 12, at_least=3) == [[1], [0], []]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        # First fit alone would fill one micro-batch and leave the rest for the other.
        ([5, 5, 2], 10, [[0, 2], [1]]),
        # Dealt to the cheapest so far, the last sequence would find no room: both must be full.
        ([5, 4, 3, 3, 3], 9, [[0, 1], [2, 3, 4]]),
        # Dealt to the cheapest so far, these would come to 7 and 5.
        ([3, 3, 2, 2, 2], 8, [[0, 1], [2, 3, 4]]),
        # One that is longer than the budget is alone, and the others do not wait for it.
        ([20, 2, 2, 2, 2], 8, [[0], [1, 2, 3, 4]]),
    ],
)
def test_micro_batches_are_even(lengths: list[int], max_tokens: int, expected: list[list[int]]) -> None:
    assert assign(lengths, lengths, max_tokens) == expected


@pytest.mark.slow
def test_few_sequences_against_every_way_there_is() -> None:
    ratios = []
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.randint(4, 24) for _ in range(8)]
        batches = assign(lengths, flops(lengths), 50)
        ratios.append(most_costly(flops(lengths), batches) / least_possible(lengths, 50, len(batches)))
    assert max(ratios) <= 1.02 and sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 15


@pytest.mark.slow
@pytest.mark.parametrize(("at_least", "above"), [(1, 0.15), (12, 0.01)])
def test_skewed_lengths_are_even_work(at_least: int, above: float) -> None:
    for seed in range(10):
        draw = random.Random(seed)
        lengths = [min(int(draw.lognormvariate(3, 0.8)) + 1, 200) for _ in range(100)]
        costs = flops(lengths)
        batches = assign(lengths, costs, 400, at_least)
        # Where the budget is nearly used up, short sequences cannot make up for a long one.
        assert most_costly(costs, batches) <= (1 + above) * max(sum(costs) / len(batches), *costs)


def shared(lengths: list[int], max_tokens: int, cp: int, at_least: int = 1) -> list[Shares]:
    return MicroBatchPlan(lengths, flops(lengths), max_tokens, cp).micro_batches(at_least)


def test_a_long_sequence_splits_its_micro_batch() -> None:
    assert shared([24, 12, 12], 40, cp=2) == [((0,),), ((1,), (2,))]
    assert shared([20, 20, 20, 20], 40, cp=2) == [((0,), (1,)), ((2,), (3,))]
    # What finds no room elsewhere comes with it: a rank has 20 tokens.
    assert shared([24, 20, 20, 8], 40, cp=2) == [((1,), (2,)), ((0, 3),)]
    assert shared([50, 4, 4], 40, cp=2) == [((0,),), ((1,), (2,))]


def test_sequences_that_do_not_fill_all_ranks_are_split() -> None:
    assert shared([4, 4, 4], 40, cp=4) == [((0, 1, 2),)]
    assert shared([4, 4, 4, 4], 40, cp=4) == [((0,), (1,), (2,), (3,))]
    # 11 tokens of 20 are within a tenth of an even share, 12 are not. The same of costs.
    assert MicroBatchPlan([11, 9], [1.0, 1.0], 40, 2).micro_batches() == [((0,), (1,))]
    assert MicroBatchPlan([12, 8], [1.0, 1.0], 40, 2).micro_batches() == [((0, 1),)]
    assert MicroBatchPlan([10, 10], [1.2, 0.8], 40, 2).micro_batches() == [((0, 1),)]


def test_empty_micro_batches_are_not_split() -> None:
    assert shared([], 40, cp=2, at_least=1) == [((), ())]
    assert shared([24], 40, cp=2, at_least=2) == [((0,),), ((), ())]


def test_one_costly_sequence_splits_no_short_ones() -> None:
    lengths = [3200, *[300] * 30, *[50] * 200]
    batches = shared(lengths, 820, cp=4)
    split = [ranks[0] for ranks in batches if len(ranks) == 1]
    assert (0,) in split and len(split) < len(batches) * 2 / 3
    assert sum(lengths[index] == 50 for index in itertools.chain(*split)) < 60


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in range(1, 5))])
def test_ranks_have_complete_sequences_and_similar_work(seed: int, cp: int) -> None:
    draw, limit = random.Random(seed), 320 * cp
    lengths = [min(int(draw.lognormvariate(3.3, 0.7)) + 1, 200) for _ in range(400)] + [500] * 5
    costs = [length * (200.0 + length) for length in lengths]
    batches = MicroBatchPlan(lengths, costs, limit, cp).micro_batches()
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(405))
    times = []
    for ranks in batches:
        if len(ranks) == 1:
            assert sum(padded_length(lengths[index], cp) for index in ranks[0]) <= limit or len(ranks[0]) == 1
            times.append(sum(costs[index] for index in ranks[0]) / cp)
            continue
        if sum(padded_length(lengths[index], cp) for index in itertools.chain(*ranks)) <= limit:
            for amounts in (lengths, costs):
                of_rank = [sum(amounts[index] for index in rank) for rank in ranks]
                assert max(of_rank) <= 1.1 * sum(of_rank) / cp
        assert max(sum(lengths[index] for index in rank) for rank in ranks) <= limit // cp
        times.append(max(sum(costs[index] for index in rank) for rank in ranks))
    all_split = assign([padded_length(length, cp) for length in lengths], costs, limit, len(batches))
    # Where ranks have no more room, micro-batches with long sequences take what is left.
    assert max(times) <= 1.35 * most_costly(costs, all_split) / cp
    long = [ranks for ranks in batches if any(lengths[index] == 500 for index in itertools.chain(*ranks))]
    assert all(len(ranks) == 1 for ranks in long)
    # Hardly any other is split.
    assert sum(len(ranks) == 1 for ranks in batches) <= len(long) + max(1, len(batches) // 8)
