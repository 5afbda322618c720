"""Tokens that Clip-Cov and KL-Cov choose: those of the whole mini-batch, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.config import load
from hybridflow.algorithms.covariance_selection import first_tokens
from hybridflow.algorithms.kl_cov import largest_first
from hybridflow.algorithms.losses.covariance import CovarianceMeans
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns


def samples(count: int, *, seed: int = 1) -> SampleBatch:
    """Responses of 0 to 9 tokens, some of which the policy did not write."""
    torch.manual_seed(seed)
    lengths = torch.randint(0, 10, (count,)).tolist()
    batch = SampleBatch.from_generations(
        prompts=[[1]] * count,
        responses=[[5] * length for length in lengths],
        logprobs=[[-1.0] * length for length in lengths],
        sample_ids=torch.randperm(10 * count)[:count].tolist(),
        group_ids=[index // 4 for index in range(count)],
        prompt_indices=[0] * count,
        policy_versions=[0] * count,
        finish_reasons=["stop"] * count,
        response_masks=[(torch.rand(length) < 0.8).tolist() for length in lengths],
    )
    # Few different log-probs and advantages, so that many covariances are equal.
    logprobs = -torch.randint(0, 4, (sum(lengths),)).float()
    of_samples = torch.randint(-1, 2, (count,)).float()
    mask = batch.response_mask
    return batch.replace(
        current_logprobs=logprobs.where(mask, torch.nan),
        advantages=of_samples.repeat_interleave(batch.response_lengths).where(mask, 0.0),
        weights=mask.float() / 7,
    )


class Ranks:
    """A batch whose samples lie on ranks, as far as a step's functions see it."""

    def __init__(self, shards: list[SampleBatch], columns: list[Columns] | None = None) -> None:
        self.shards, self.columns = shards, columns

    def with_columns(self, applied: Applied) -> Ranks:
        return Ranks(self.shards, applied.columns)


class Applied:
    def __init__(self, columns: list[Columns]) -> None:
        self.columns = columns

    def per_sample(self) -> dict[str, Tensor]:
        names = self.columns[0].per_sample
        return {name: torch.cat([column.per_sample[name] for column in self.columns]) for name in names}

    def notes(self) -> list[Any]:
        return [column.note for column in self.columns]


class StepOnRanks:
    """The operations of a step that the selection needs."""

    def __init__(self, config: Any, seed: int = 0) -> None:
        self.config, self.seed, self.forward_passes = config, seed, 0

    def current_logprobs(self, batch: Ranks) -> Ranks:
        self.forward_passes += 1
        return batch

    def apply(self, batch: Ranks, function: Callable[..., Columns], **arguments: Any) -> Applied:
        return Applied([function(shard, config=self.config, **arguments) for shard in batch.shards])

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def selected(algorithm: Algorithm[Any], shards: list[SampleBatch], config: Any, seed: int = 0) -> set[tuple[int, int]]:
    """Sample and number of each chosen token."""
    step: Any = StepOnRanks(config, seed)
    batch: Any = Ranks(shards)
    assert algorithm.prepare is not None
    result: Any = algorithm.prepare(step, batch)
    assert step.forward_passes == 1
    positions = set()
    for shard, columns in zip(shards, result.columns, strict=True):
        chosen = columns.tokens["selected"]
        assert chosen.dtype == torch.float32
        assert set(chosen.tolist()) <= {0.0, 1.0}
        for position in chosen.nonzero()[:, 0].tolist():
            sample, token = shard.place_of(position)
            positions.add((int(shard.sample_ids[sample]), token))
    return positions


def covariances(batch: SampleBatch) -> dict[tuple[int, int], float]:
    """Covariance of each loss token, from all of the batch at once."""
    logprobs, advantages = batch.current_logprobs, batch.advantages
    assert logprobs is not None
    assert advantages is not None
    mask = batch.response_mask
    values = (logprobs - logprobs[mask].mean()).double() * (advantages - advantages[mask].mean()).double()
    results = {}
    for position in mask.nonzero()[:, 0].tolist():
        sample, token = batch.place_of(position)
        results[int(batch.sample_ids[sample]), token] = float(values[position])
    return results


def cuts(batch: SampleBatch) -> list[list[SampleBatch]]:
    """The samples in one part, and dealt to ranks in several ways, one of them without any."""
    results = [[batch]]
    for seed in range(4):
        torch.manual_seed(seed)
        order = torch.randperm(len(batch))
        results.append([batch.select(shard) for shard in order.tensor_split([1, 5, 5, 17])])
    return results


@pytest.mark.parametrize("fraction", [1e-4, 0.05, 0.3, 1.0])
def test_kl_cov_chooses_the_largest_covariances_in_any_cut(fraction: float) -> None:
    batch = samples(40)
    algorithm, of_tokens = load("kl_cov"), covariances(batch)
    config = algorithm.settings(kl_cov_fraction=fraction)
    results = [selected(algorithm, cut, config) for cut in cuts(batch)]
    assert all(result == results[0] for result in results)
    assert len(results[0]) == max(1, int(fraction * len(of_tokens)))
    left = [value for position, value in of_tokens.items() if position not in results[0]]
    if left:
        assert min(of_tokens[result] for result in results[0]) >= max(left) - 1e-5
        # Of equal ones those of the lowest sample id.
        edge = min(of_tokens[result] for result in results[0])
        equal = sorted(position for position, value in of_tokens.items() if abs(value - edge) < 1e-5)
        chosen = [position for position in equal if position in results[0]]
        assert chosen == equal[: len(chosen)]


@pytest.mark.slow
def test_clip_cov_draws_within_the_bounds_the_same_tokens_in_any_cut() -> None:
    batch = samples(40)
    algorithm, of_tokens = load("clip_cov"), covariances(batch)
    config = algorithm.settings(clip_cov_fraction=0.05, clip_cov_low=0.4, clip_cov_high=1.6)
    results = [selected(algorithm, cut, config, seed=3) for cut in cuts(batch)]
    assert all(result == results[0] for result in results)
    within = {position for position, value in of_tokens.items() if 0.4 <= value <= 1.6}
    assert results[0] < within
    assert len(results[0]) == int(0.05 * len(of_tokens))
    draws = [selected(algorithm, [batch], config, seed=seed) for seed in range(200)]
    assert len({frozenset(draw) for draw in draws}) > 190
    assert set().union(*draws) == within  # each may be drawn
    shares = [sum(position in draw for draw in draws) / len(draws) for position in within]
    expected = len(results[0]) / len(within)
    assert max(abs(share - expected) for share in shares) < 5 * (expected / len(draws)) ** 0.5


def test_clip_cov_takes_all_within_the_bounds_where_they_are_fewer_and_none_where_there_are_none() -> None:
    batch = samples(40)
    algorithm, of_tokens = load("clip_cov"), covariances(batch)
    config = algorithm.settings(clip_cov_fraction=1.0, clip_cov_low=0.4, clip_cov_high=1.6)
    assert selected(algorithm, [batch], config) == {at for at, value in of_tokens.items() if 0.4 <= value <= 1.6}
    config = algorithm.settings(clip_cov_fraction=0.5, clip_cov_low=50.0, clip_cov_high=60.0)
    assert all(selected(algorithm, cut, config) == set() for cut in cuts(batch))


def test_tokens_without_a_weight_neither_count_nor_are_chosen() -> None:
    """Samples that a filter has left without a weight are as good as gone."""
    batch = samples(40)
    assert batch.weights is not None
    kept = torch.arange(40) % 3 > 0
    of_tokens = kept.repeat_interleave(batch.response_lengths)
    filtered = batch.replace(weights=batch.weights.where(of_tokens, 0.0))
    for name in ("kl_cov", "clip_cov"):
        algorithm = load(name)
        config = algorithm.settings(**{f"{name}_fraction": 0.1})
        remaining = batch.select(kept.nonzero()[:, 0])
        assert selected(algorithm, [filtered], config) == selected(algorithm, [remaining], config) != set()


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_tokens_that_a_correction_leaves_out_neither_count_nor_are_chosen(name: str) -> None:
    batch, algorithm = samples(40), load(name)
    config = algorithm.settings(**{f"{name}_fraction": 0.1})
    assert batch.weights is not None
    kept = torch.rand(len(batch.weights)) < 0.6
    filtered = batch.replace(weights=batch.weights.where(kept, 0.0))
    corrected = batch.replace(correction_weights=torch.where(kept, 0.3, 0.0))
    expected = selected(algorithm, [filtered], config)
    assert expected != selected(algorithm, [batch], config)
    assert [selected(algorithm, cut, config) for cut in cuts(corrected)] == [expected] * 5


def test_a_rank_names_no_more_tokens_than_can_be_chosen() -> None:
    batch = samples(40)
    arguments: dict[str, Any] = {"order": largest_first, "means": CovarianceMeans(-1.0, 0.0, 100), "salt": 0}
    note = first_tokens(batch, config=None, number=3, **arguments).note
    assert len(note.ranks) == 3
