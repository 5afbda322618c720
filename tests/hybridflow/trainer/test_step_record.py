"""Results of a step whose samples came in several rollouts are those of one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from hybridflow.algorithms.dynamic_sampling import GroupKind, SamplingTally
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import pack
from hybridflow.data.prompts import Prompts
from hybridflow.metrics import names as metrics
from hybridflow.rewards.result import RewardFailure, RewardResult, join_results
from hybridflow.rollout.rollouts import Rollout
from hybridflow.trainer.step_record import RewardsBySource, Scores, StepRecord, rollout_metrics
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
    batches = [([1.0, NAN, 2.0], 1), ([6.0], None)]
    scores: list[Scores] = []
    for values, dropped in batches:
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
    metrics_of_all = rollout_metrics(rollouts, version=4)
    assert metrics_of_all == {
        metrics.ROLLOUT_TIME: 3000.0,
        metrics.ROLLOUT_THROUGHPUT: (16 * 2 + 4 * 8) / 3,
        metrics.ROLLOUT_STALENESS: 1.0,
        metrics.ROLLOUT_RESPONSE_LENGTH: (16 * 2 + 4 * 8) / 20,
        metrics.ROLLOUT_TRUNCATED: 0.2,
    }
    restored = rollout_metrics([rollouts[0], Rollout(rollouts[1].batch, None)], version=4)
    assert metrics.ROLLOUT_TIME not in restored


@pytest.mark.parametrize("version", [6, 7])
@pytest.mark.parametrize("mixed", [True, False])
def test_routes_of_older_weights_are_counted(version: int, mixed: bool) -> None:
    versions = [[4, 5, 6, 6], [6, 6], [5, 5, 5]] if mixed else [[4] * 4, [6] * 2, [5] * 3]
    samples = SampleBatch.from_generations(
        prompts=[[1, 2]] * 3,
        responses=[[3] * len(row) for row in versions],
        logprobs=[[-1.0] * len(row) for row in versions],
        sample_ids=range(3),
        group_ids=[0] * 3,
        prompt_indices=[0] * 3,
        policy_versions=[row[0] for row in versions],
        finish_reasons=["stop"] * 3,
        token_versions=versions if mixed else None,
        routes=[np.zeros((len(row) + 1, 4), np.uint8) for row in versions],
    )
    _, summary = pack(samples)
    assert summary is not None
    batch = RemoteBatch(summary.per_sample, [])
    values = rollout_metrics([Rollout(batch.select(rows), 1.0) for rows in ([0, 2], [1])], version=version)
    older = sum(token < version for row in versions for token in row)
    assert values[metrics.ROUTES_OLDER_SHARE] == older / 9 > 0
    assert values[metrics.ROUTES_MISSING_SHARE] == 0


class Mixed(Prompts):
    """Prompts 0 to 2 of one source, 3 and 4 of another; a third has none in the step."""

    def sources(self) -> tuple[tuple[str, int], ...]:
        return ("easy", 3), ("hard", 5), ("other", 9)


def test_each_source_has_its_samples_and_its_mean_reward() -> None:
    rewards = RewardsBySource()
    rewards.add(torch.tensor([0, 0, 2, 3]), torch.tensor([1.0, 0.0, 0.5, 0.25]))
    rewards.add(torch.tensor([4]), torch.tensor([0.75]))
    assert rewards.metrics(Mixed([], [])) == {
        "data/easy/samples": 3,
        "data/easy/reward_mean": 0.5,
        "data/hard/samples": 2,
        "data/hard/reward_mean": 0.5,
    }
    assert rewards.metrics(Prompts([], [])) == {}


def test_a_record_adds_the_results_of_another() -> None:
    made, record = StepRecord(stale=True, tokens=7, recalled={7}), StepRecord(tokens=5)
    for part_of, value in ((made, 100.0), (record, 20.0)):
        part_of.values |= {"rollout/time_ms": value, "reward/mean": value}
    prompts = Prompts([], [])
    record.add_rewards(torch.tensor([3, 3, 3, 3, 5, 5, 5, 5]), torch.tensor([1.0, 1.0, *[0.0] * 6]), prompts, 0.5)
    made.add_rewards(torch.tensor([3, 3, 3, 3]), torch.tensor([1.0, 0.0, 0.0, 0.0]), prompts, 0.5)
    record.add_all(made, serving=0, prompts=prompts)
    assert (record.tokens, record.values) == (12, {"rollout/time_ms": 120.0, "reward/mean": 100.0})
    assert record.stale and record.recalled == {7} and record.pass_rates == {3: 3 / 8, 5: 0.0}


def test_counts_and_shares_of_several_rollouts_are_of_all_their_prompts() -> None:
    record = StepRecord()
    for drawn, right in ((4, 1), (12, 7)):
        tally = SamplingTally(rounds=1, drawn=drawn, used=2, filtered=Counter({GroupKind.ALL_RIGHT: right}))
        made = StepRecord()
        made.values |= tally.metrics()
        made.add_means(tally.shares())
        record.add_all(made, serving=0, prompts=Prompts([], []))
    assert {name: value for name, value in record.values.items() if value} == {
        "sampling/rounds": 2,
        "sampling/drawn_prompts": 16,
        "sampling/used_prompts": 4,
        "sampling/filtered_prompts": 8,
        "sampling/all_right_fraction": 0.5,
    }


def test_means_are_of_all_values_that_were_added() -> None:
    record = StepRecord()
    record.add_means({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([])})
    record.add_means({"a": torch.tensor([6.0])})
    assert record.values == {"a": 3.0}
    all_rollouts = StepRecord()
    for _ in range(2):
        all_rollouts.add_all(record, serving=0, prompts=Prompts([], []))
    other = StepRecord()
    other.add_means({"a": torch.tensor([12.0])})
    all_rollouts.add_all(other, serving=0, prompts=Prompts([], []))
    assert all_rollouts.values == {"a": 30 / 7}
