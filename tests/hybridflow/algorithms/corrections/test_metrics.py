"""Figures of a correction: by hand, and the same however samples were dealt to ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.corrections.metrics import correction_columns, correction_metrics
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.metrics import names as metrics


def samples(ratios: list[list[float | None]]) -> SampleBatch:
    """Responses whose tokens have these ratios of the trainer's probability to the engine's; None is no token of the
    policy."""
    flat = [ratio for response in ratios for ratio in response]
    mask = torch.tensor([ratio is not None for ratio in flat], dtype=torch.bool)
    batch = SampleBatch.from_generations(
        prompts=[[1, 2]] * len(ratios),
        responses=[[3] * len(response) for response in ratios],
        logprobs=[[-0.5] * len(response) for response in ratios],
        sample_ids=list(range(len(ratios))),
        group_ids=[0] * len(ratios),
        prompt_indices=[0] * len(ratios),
        policy_versions=[0] * len(ratios),
        finish_reasons=["stop"] * len(ratios),
        response_masks=[[ratio is not None for ratio in response] for response in ratios],
    )
    mine = torch.tensor([math.nan if ratio is None else math.log(ratio) for ratio in flat], dtype=torch.float32)
    return batch.replace(old_logprobs=(mine + batch.logprobs).where(mask, math.nan))


def config(**settings: object) -> GRPOSettings:
    return GRPOSettings(correction=settings)


def metrics_of(batch: SampleBatch, **settings: object) -> dict[str, float]:
    configured = config(**settings)
    assert configured.correction is not None
    return correction_metrics(correction_columns(batch, config=configured).per_sample, configured.correction)


HAND: list[list[float | None]] = [[2.0, 0.5], [4.0, None, 1.0], [], [None]]


def test_divergences_by_hand() -> None:
    values = metrics_of(samples(HAND))
    assert values[metrics.CORRECTION_KL_K1] == pytest.approx(-math.log(4) / 4, rel=1e-6)
    assert values[metrics.CORRECTION_KL_K3] == pytest.approx((2 + 0.5 + 4 + 1 - 4 - math.log(4)) / 4, rel=1e-6)
    assert values[metrics.CORRECTION_CHI_SQUARE_TOKEN] == pytest.approx((4 + 0.25 + 16 + 1) / 4 - 1, rel=1e-6)
    assert values[metrics.CORRECTION_CHI_SQUARE_SEQUENCE] == pytest.approx((1 + 16) / 2 - 1, rel=1e-6)
    # Nothing has a weight but 1 that is only measured.
    assert values[metrics.CORRECTION_EFFECTIVE_TOKENS] == values[metrics.CORRECTION_EFFECTIVE_SAMPLES] == 1.0
    assert values[metrics.CORRECTION_WEIGHT_MIN] == values[metrics.CORRECTION_WEIGHT_MAX] == 1.0
    assert not {metrics.CORRECTION_TRUNCATED, metrics.CORRECTION_MASKED_LOW, metrics.CORRECTION_VETOED} & values.keys()
    assert metrics.CORRECTION_LOST_SAMPLES not in values


def test_weights_by_hand() -> None:
    values = metrics_of(samples(HAND), weights="token", truncate=2.5)
    assert values[metrics.CORRECTION_WEIGHT_MEAN] == pytest.approx((2 + 0.5 + 2.5 + 1) / 4, rel=1e-6)
    assert values[metrics.CORRECTION_WEIGHT_MIN] == pytest.approx(0.5)
    assert values[metrics.CORRECTION_WEIGHT_MAX] == 2.5
    assert values[metrics.CORRECTION_TRUNCATED] == 0.25
    assert values[metrics.CORRECTION_EFFECTIVE_TOKENS] == pytest.approx(36 / (4 * (4 + 0.25 + 6.25 + 1)), rel=1e-6)
    assert values[metrics.CORRECTION_EFFECTIVE_SAMPLES] == pytest.approx(3**2 / (2 * (1.25**2 + 1.75**2)), rel=1e-6)


def test_shares_are_of_tokens_or_of_samples_by_their_level() -> None:
    values = metrics_of(samples(HAND), weights="sequence", truncate=3.0, mask="token", mask_low=0.6, mask_high=3.5)
    assert values[metrics.CORRECTION_TRUNCATED] == 0.5  # of the two samples that have a token
    assert values[metrics.CORRECTION_MASKED_LOW] == values[metrics.CORRECTION_MASKED_HIGH] == 0.25
    assert values[metrics.CORRECTION_LOST_SAMPLES] == 0.0
    values = metrics_of(samples(HAND), mask="sequence", mask_low=0.6, mask_high=3.5, veto=0.7)
    assert values[metrics.CORRECTION_MASKED_HIGH] == 0.5
    assert values[metrics.CORRECTION_MASKED_LOW] == 0.0
    assert values[metrics.CORRECTION_VETOED] == 0.5
    assert values[metrics.CORRECTION_LOST_SAMPLES] == 1.0
    assert values[metrics.CORRECTION_EFFECTIVE_TOKENS] == values[metrics.CORRECTION_EFFECTIVE_SAMPLES] == 0.0
    assert values[metrics.CORRECTION_WEIGHT_MAX] == 0.0


def test_nothing_counted_has_no_figures() -> None:
    assert metrics_of(samples([[], [None]]), veto=0.5) == {}


def random_samples(count: int) -> SampleBatch:
    torch.manual_seed(2)
    ratios: list[list[float | None]] = [
        [math.exp(ratio) if ratio > -0.8 else None for ratio in (0.4 * torch.randn(length)).tolist()]
        for length in torch.randint(0, 30, (count,)).tolist()
    ]
    return samples(ratios)


def test_figures_and_weights_are_the_same_bits_however_samples_are_dealt() -> None:
    batch = random_samples(16)
    settings = config(weights="sequence", truncate=1.5, mask="token", mask_low=0.5, mask_high=2.0, veto=0.46)
    assert settings.correction is not None
    full = correction_columns(batch, config=settings)
    values = correction_metrics(full.per_sample, settings.correction)
    assert len(values) == 14 and all(map(math.isfinite, values.values()))
    for seed, cut in enumerate([[3, 4, 11], [8], [0, 5, 5]]):
        torch.manual_seed(seed)
        order = torch.randperm(16)
        shards = [correction_columns(batch.select(rows), config=settings) for rows in order.tensor_split(cut)]
        back = order.argsort()
        per_sample = {name: torch.cat([shard.per_sample[name] for shard in shards])[back] for name in full.per_sample}
        assert correction_metrics(per_sample, settings.correction) == values
        rows: list[Tensor] = []
        for shard, chosen in zip(shards, order.tensor_split(cut), strict=True):
            rows += shard.tokens["correction_weights"].split(batch.response_lengths[chosen].tolist())
        assert torch.equal(torch.cat([rows[row] for row in back.tolist()]), full.tokens["correction_weights"])


def test_padded_rows_and_packed_samples_have_the_same_weights() -> None:
    batch = random_samples(8)
    padded = {
        name: batch.padded(column) if column.shape == batch.response_mask.shape else column
        for name, column in batch.columns().items()
        if name != "tokens"
    }
    padded |= {"input_ids": torch.ones(8, 2, dtype=torch.int64), "generated_ids": batch.padded(batch.response_mask) + 0}
    again = SampleBatch.from_padded(padded)
    for level in ("token", "sequence", "geometric"):
        settings = config(weights=level, truncate=None)
        columns = [correction_columns(entry, config=settings).tokens["correction_weights"] for entry in (batch, again)]
        assert torch.equal(*columns)


def test_log_probs_of_the_trainer_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.correction needs old_logprobs"):
        correction_columns(samples(HAND).replace(old_logprobs=None), config=config())
