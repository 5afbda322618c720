"""Figures of a step whose samples came in several rollouts are those of one."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.metrics import names as metrics
from hybridflow.rewards.result import RewardFailure, RewardResult, join_results
from hybridflow.rollout.source import Rollout
from hybridflow.trainer.step_figures import Scores, rollout_metrics
from tests.support.steps import NumberedStep

NAN = float("nan")


def a_result(values: list[float], *failed: int) -> RewardResult:
    column = torch.tensor(values)
    mask = torch.tensor([row in failed for row in range(len(values))])
    failures = tuple(RewardFailure("length", row, "raised") for row in failed)
    return RewardResult(column, {"length": column}, {"length": mask}, mask, failures)


def test_results_of_parts_are_those_of_the_whole() -> None:
    joined = join_results([a_result([1.0, NAN], 1), a_result([3.0]), a_result([NAN, 5.0], 0)])
    assert joined.total[~joined.dropped].tolist() == [1.0, 3.0, 5.0]
    assert joined.dropped.tolist() == [False, True, False, True, False]
    assert [failure.sample for failure in joined.failures] == [1, 3]
    assert torch.equal(joined.failed["length"], joined.dropped)


def test_scores_of_parts_are_those_of_the_whole() -> None:
    parts = [([1.0, NAN, 2.0], 1), ([6.0], None)]
    scores = []
    for values, dropped in parts:
        result = a_result(values, *([dropped] if dropped is not None else []))
        ids = torch.arange(len(values)) + 10 * len(scores)
        scores.append(Scores(ids, result.total, ~result.dropped, result, torch.ones(len(values))))
    by_name = Scores.join(scores).by_name("cost")
    assert list(by_name) == ["cost/length", "cost/model"]
    assert by_name["cost/length"].of(torch.tensor([10, 2, 7])).to_pylist() == [6.0, 2.0, None]
    assert Scores.join(scores).metrics("reward") == {
        "reward/length/mean": 3.0,
        "reward/length/failed": 1,
        "reward/dropped": 1,
        "reward/model/mean": 1.0,
        "reward/mean": 3.0,
        "reward/std": pytest.approx((14 / 3) ** 0.5),
    }
    alone = Scores(torch.arange(2), torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.bool), None, None)
    assert Scores.join([alone]).metrics("cost") == {"cost/mean": 2.0, "cost/std": 1.0}


def test_rollouts_of_a_step_are_told_as_one() -> None:
    step = NumberedStep(GRPOSettings(), lambda group, sample: 0.0, lambda group, sample: 2 + 6 * (group == 4), number=3)
    rollouts = [Rollout(step.generate(step.draw(count)), seconds) for count, seconds in ((4, 2.0), (1, 1.0))]
    found = rollout_metrics(rollouts, version=4)
    assert found == {
        metrics.ROLLOUT_TIME: 3000.0,
        metrics.ROLLOUT_THROUGHPUT: (16 * 2 + 4 * 8) / 3,
        metrics.ROLLOUT_STALENESS: 1.0,
        metrics.ROLLOUT_RESPONSE_LENGTH: (16 * 2 + 4 * 8) / 20,
        metrics.ROLLOUT_TRUNCATED: 0.2,
    }
    restored = rollout_metrics([rollouts[0], Rollout(rollouts[1].batch, None)], version=4)
    assert metrics.ROLLOUT_TIME not in restored
