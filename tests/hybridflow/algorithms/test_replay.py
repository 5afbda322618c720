"""Capacity, draws and removals of the replay buffer."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from hybridflow.algorithms.replay import ReplayBuffer, most_bytes
from hybridflow.batch.sample_batch import SampleBatch
from tests.support.steps import ids


def samples(*numbers: int, version: int = 1, length: int = 3) -> SampleBatch:
    batch = SampleBatch.from_generations(
        prompts=[[5, 6]] * len(numbers),
        responses=[[number] * length for number in numbers],
        logprobs=[[-0.1 * number] * length for number in numbers],
        sample_ids=numbers,
        group_ids=[number // 4 for number in numbers],
        prompt_indices=[number // 4 for number in numbers],
        policy_versions=[version] * len(numbers),
        finish_reasons=["stop"] * len(numbers),
    )
    return batch.replace(rewards=torch.tensor([float(number) for number in numbers]))


def test_the_oldest_leave_where_there_is_no_room() -> None:
    buffer = ReplayBuffer(4)
    assert len(buffer) == 0 and buffer.take(3, Generator()) is None
    buffer.add(samples(1, 2, 3))
    buffer.add(samples(7, 8, 9))
    assert ids(buffer.samples) == [3, 7, 8, 9]
    buffer.add(samples(*range(10, 20)))
    assert ids(buffer.samples) == [16, 17, 18, 19]
    nothing = ReplayBuffer(0)
    nothing.add(samples(1))
    assert len(nothing) == 0 and nothing.samples is None


def test_what_is_taken_has_left_and_is_what_went_in() -> None:
    buffer = ReplayBuffer(100)
    buffer.add(samples(*range(1, 9)))
    taken = buffer.take(3, Generator().manual_seed(2))
    assert taken is not None and len(taken) == 3 and ids(taken) == sorted(ids(taken))
    assert sorted([*ids(taken), *ids(buffer.samples)]) == list(range(1, 9))
    for sample, response, reward in zip(ids(taken), taken.responses(), taken.rewards.tolist(), strict=True):  # type: ignore[union-attr]
        assert response == [sample] * 3 and reward == sample
    rest = buffer.take(9, Generator())
    assert len(ids(rest)) == 5 and buffer.samples is None
    assert buffer.take(1, Generator()) is None


@pytest.mark.slow
def test_every_sample_is_as_likely() -> None:
    counts = torch.zeros(6)
    for seed in range(300):
        buffer = ReplayBuffer(10)
        buffer.add(samples(*range(6)))
        counts[ids(buffer.take(2, Generator().manual_seed(seed)))] += 1
    assert counts.sum() == 600 and ((counts - 100).abs() < 35).all()


def test_the_same_seed_takes_the_same() -> None:
    results = []
    for _ in range(2):
        buffer = ReplayBuffer(10)
        buffer.add(samples(*range(6)))
        results.append(ids(buffer.take(3, Generator().manual_seed(4))))
    assert results[0] == results[1]


def test_what_is_too_old_leaves() -> None:
    buffer = ReplayBuffer(10, max_age=2)
    buffer.add(samples(1, version=1))
    buffer.add(samples(2, version=2))
    buffer.add(samples(3, version=3))
    buffer.drop_older(3)
    assert ids(buffer.samples) == [1, 2, 3]
    buffer.drop_older(4)
    assert ids(buffer.samples) == [2, 3]
    buffer.drop_older(9)
    assert buffer.samples is None
    buffer.drop_older(9)
    unlimited = ReplayBuffer(10)
    unlimited.add(samples(1, version=1))
    unlimited.drop_older(10_000)
    assert len(unlimited) == 1


def test_a_buffer_that_is_smaller_now_keeps_the_newest() -> None:
    buffer = ReplayBuffer(2)
    buffer.restore(samples(1, 2, 3))
    assert ids(buffer.samples) == [2, 3]
    buffer.restore(None)
    assert len(buffer) == 0


def test_the_estimate_of_its_memory_is_what_its_columns_take_at_most() -> None:
    batch = samples(*range(10), length=50)
    resident = sum(column.numel() * column.element_size() for column in batch.columns().values())
    estimate = most_bytes(10, 52)
    assert resident <= estimate <= 1.1 * resident


def test_samples_of_an_earlier_version_join_those_that_say_where_they_are_from() -> None:
    buffer = ReplayBuffer(10)
    buffer.restore(samples(1, 2))
    times = torch.tensor([1.0, 2.0], dtype=torch.float64)
    buffer.add(samples(3, 4).replace(engines=torch.tensor([0, 1]), began=times, ended=times))
    joined = buffer.samples
    assert joined is not None and joined.engines is not None and joined.began is not None
    assert joined.engines.tolist() == [-1, -1, 0, 1]
    assert joined.began[:2].isnan().all() and torch.equal(joined.began[2:], times)
