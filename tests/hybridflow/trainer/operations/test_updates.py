"""Corrections in the driver, on a step whose ranks are functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.worker_output import joined_per_sample
from hybridflow.metrics import names as metrics
from hybridflow.trainer.operations.updates import corrected, log_empty
from tests.hybridflow.algorithms.corrections.test_metrics import samples

LOST = {"mask": "token", "mask_low": 0.5, "mask_high": 2.0}
RATIOS: list[list[float | None]] = [[3.0, 4.0], [0.1], [5.0], [3.0], [1.0, 9.0], []]
OTHERS: list[list[float | None]] = [[1.0], [1.0], [1.0], [1.0], [1.0], [9.0]]


class _Applied:
    """Output of two ranks."""

    def __init__(self, shards: list[Any], ids: Tensor) -> None:
        half = len(ids) // 2
        self.refs, self.nodes, self.sample_ids = [None, None], ["node", "node"], ids
        self.shard_indices = [tuple(range(half)), tuple(range(half, len(ids)))]
        self._per_sample = joined_per_sample([shard.per_sample for shard in shards])

    def per_sample(self) -> dict[str, Tensor]:
        return self._per_sample


class _Step:
    """A step with samples of such ratios."""

    def __init__(self, ratios: list[list[float | None]], **correction: Any) -> None:
        self.config = GRPOSettings(correction=correction or None)
        self.values: dict[str, float] = {}
        self.number, self.applied = 3, 0
        self._batch = samples(ratios)
        per_sample = {name: column for name, column in self._batch.columns().items() if len(column) == len(ratios)}
        self.batch = RemoteBatch(per_sample, [])

    def apply(self, batch: RemoteBatch, function: Any) -> _Applied:
        self.applied += 1
        halves = [self._batch.select(range(3)), self._batch.select(range(3, 6))]
        return _Applied([function(half, config=self.config) for half in halves], batch.per_sample["sample_ids"])


def correct(**correction: Any) -> tuple[_Step, Any]:
    step = _Step(RATIOS, **correction)
    return step, corrected(step, step.batch, [])  # type: ignore[arg-type]


def test_without_a_correction_nothing_is_called_and_everything_has_weight() -> None:
    for correction in ({}, {"against": "rollout"}):
        step, result = correct(**correction)
        assert result.batch is step.batch and not step.applied and not step.values
        assert all(result.has_weight(mini_batch) for mini_batch in step.batch.split(3))
        log_empty(step, 0, 3)  # type: ignore[arg-type]
        assert not step.values


def test_mini_batches_without_a_weight_are_found_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    step, result = correct(**LOST)
    assert [result.has_weight(mini_batch) for mini_batch in result.batch.split(3)] == [False, False, True]
    assert step.values[metrics.CORRECTION_LOST_SAMPLES] == pytest.approx(4 / 5)
    assert step.applied == 1
    log_empty(step, 2, 3)  # type: ignore[arg-type]
    assert step.values[metrics.CORRECTION_EMPTY_UPDATES] == 2
    assert (
        "step 3: algorithm.correction leaves no token in the mini-batches of 2 of 3 updates" in capfd.readouterr().err
    )
    log_empty(step, 0, 3)  # type: ignore[arg-type]
    assert step.values[metrics.CORRECTION_EMPTY_UPDATES] == 2
    assert not capfd.readouterr().err


def test_metrics_are_of_all_samples_that_a_step_trains_on() -> None:
    columns: list[Any] = []
    for ratios in (RATIOS, OTHERS):
        step = _Step(ratios, **LOST)
        corrected(step, step.batch, columns)  # type: ignore[arg-type]
    assert step.values[metrics.CORRECTION_LOST_SAMPLES] == pytest.approx((4 + 1) / (5 + 6))


def test_weights_come_to_the_batch_as_a_column() -> None:
    _, result = correct(weights="token")
    assert len(result.batch.inputs) == 1
    assert result.left == {0, 1, 2, 3, 4}  # the last has no token


def test_a_response_may_lose_all_its_tokens_while_its_group_does_not() -> None:
    _, result = correct(veto=0.5)
    assert result.left == {0, 2, 3, 4}
    # Advantages are of all rewards of the group, and were found before.
    assert torch.equal(result.batch.per_sample["group_ids"], torch.zeros(6, dtype=torch.int64))
