"""Advantages and returns of the algorithms with critics: from plain sums, and however samples are dealt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import ppo, safe_rlhf, vapo
from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.algorithms.ppo import PPOSettings
from hybridflow.algorithms.safe_rlhf import SafeRLHFSettings
from hybridflow.algorithms.vapo import VAPOSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from tests.support.local_step import make_samples

KL, GAMMA, LAMBDA, MULTIPLIER = 0.3, 0.9, 0.8, 1.5
SHARED = {"kl_coef": KL, "gamma": GAMMA}

ESTIMATES: dict[str, tuple[Callable[..., Columns], Any, dict[str, float]]] = {
    "ppo": (ppo.estimate_advantages, PPOSettings(**SHARED, gae_lambda=LAMBDA), {}),
    "safe_rlhf": (
        safe_rlhf.estimate_advantages,
        SafeRLHFSettings(**SHARED, gae_lambda=LAMBDA),
        {"multiplier": MULTIPLIER},
    ),
    "vapo": (
        vapo.estimate_advantages,
        VAPOSettings(**SHARED, length_adaptive_alpha=0.5),
        {"critic_lambda": LAMBDA},
    ),
}
"""The function, settings, and what it is given beside them; pf_ppo and ippo have that of ppo."""


def samples(count: int = 9) -> SampleBatch:
    torch.manual_seed(1)
    batch = make_samples([0] * count, torch.randn(count).tolist(), longest=7)
    tokens = len(batch.logprobs)
    return batch.replace(
        costs=torch.randn(count),
        values=torch.randn(tokens),
        cost_values=torch.randn(tokens),
        ref_logprobs=batch.logprobs + 0.5 * torch.randn(tokens),
    )


def plain_gae(score: float, values: list[float], kl: list[float], sign: float, lam: float) -> list[float]:
    """The double sum, over the loss tokens of one response; the penalty is taken from what is to be large."""
    rewards = [-sign * KL * entry for entry in kl]
    rewards[-1] += score
    errors = [
        reward + GAMMA * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, reward in enumerate(rewards)
    ]
    return [sum((GAMMA * lam) ** away * error for away, error in enumerate(errors[t:])) for t in range(len(errors))]


def of_row(batch: SampleBatch, row: int, column: Tensor) -> list[float]:
    """Select the loss tokens of a sample."""
    one = batch.select([row])
    start = int(batch.response_lengths[:row].sum())
    return column[start : start + int(one.response_lengths[0])][one.response_mask].tolist()


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_are_the_sums_of_the_papers(name: str) -> None:
    batch, (function, config, arguments) = samples(), ESTIMATES[name]
    result = function(batch, config=config, **arguments).tokens
    assert batch.values is not None and batch.cost_values is not None and batch.ref_logprobs is not None
    assert batch.rewards is not None and batch.costs is not None
    for row in range(len(batch)):
        kl = of_row(batch, row, batch.logprobs - batch.ref_logprobs)
        values, cost_values = of_row(batch, row, batch.values), of_row(batch, row, batch.cost_values)
        reward, cost = float(batch.rewards[row]), float(batch.costs[row])
        lam = max(1 - 1 / (0.5 * len(kl)), 0) if name == "vapo" else LAMBDA
        expected = plain_gae(reward, values, kl, 1, lam)
        of_critic = plain_gae(reward, values, kl, 1, LAMBDA)
        returns = [advantage + value for advantage, value in zip(of_critic, values, strict=True)]
        if name == "safe_rlhf":
            of_cost = plain_gae(cost, cost_values, kl, -1, LAMBDA)
            expected = [(up - MULTIPLIER * down) / (1 + MULTIPLIER) for up, down in zip(expected, of_cost, strict=True)]
            cost_returns = [down + value for down, value in zip(of_cost, cost_values, strict=True)]
            assert of_row(batch, row, result["cost_returns"]) == pytest.approx(cost_returns, rel=1e-5, abs=1e-6)
        assert of_row(batch, row, result["advantages"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert of_row(batch, row, result["returns"]) == pytest.approx(returns, rel=1e-5, abs=1e-6)
    assert all(column[~batch.response_mask].count_nonzero() == 0 for column in result.values())


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_are_the_same_bits_however_samples_are_dealt(name: str) -> None:
    """Also those that what is outside the mask would change; the moments of all pieces are those of the whole."""
    batch, (function, config, arguments) = samples(), ESTIMATES[name]
    full = function(batch, config=config, **arguments)
    lengths = batch.response_lengths.tolist()
    soiled = batch.replace(
        values=batch.values.where(batch.response_mask, torch.nan),  # type: ignore[union-attr]
        ref_logprobs=batch.ref_logprobs.where(batch.response_mask, torch.nan),  # type: ignore[union-attr]
    )
    for cut in ([3], [1, 5], [2, 4, 8], [0, 4, 4]):
        order = torch.randperm(len(batch))
        shards = order.tensor_split(cut)
        chunks = [function(soiled.select(shard), config=config, **arguments) for shard in shards]
        for column, values in full.tokens.items():
            of_samples = values.split(lengths)
            expected = torch.cat([of_samples[row] for row in order])
            assert torch.equal(torch.cat([chunk.tokens[column] for chunk in chunks]), expected)
        merged = Moments.merge(chunk.note.advantages for chunk in chunks)
        assert merged.count == full.note.advantages.count
        assert merged.mean == pytest.approx(full.note.advantages.mean, rel=1e-12, abs=1e-15)
        assert merged.variance == pytest.approx(full.note.advantages.variance, rel=1e-12)
