"""Results of a step that need no further call to ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.dpo import DPOSettings
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.metrics import names as metrics
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.result import RewardFailure, RewardResult
from hybridflow.roles.model import Update
from hybridflow.trainer.operations.model_columns import old_logprobs
from hybridflow.trainer.operations.scoring import SampleScoring
from hybridflow.trainer.operations.updates import ActorUpdate
from hybridflow.trainer.step import TrainerStep
from hybridflow.trainer.step_record import StepRecord


class Batch:
    """Says what became of a mini-batch."""

    def as_generated(self) -> Batch:
        return self

    def with_columns(self, *unnamed: Any, **columns: Any) -> dict[str, Any]:
        return columns | {name: column for future in unnamed for name, column in future.items()}


class Actor:
    layout = Layout()

    def actor_logprobs(
        self, batch: Any, *, temperature: float, column: str, serving: int, records_routes: bool
    ) -> dict[str, str]:
        return {column: f"forward pass at {temperature}" + " with routes" * records_routes}

    def apply(self, batch: Any, *, function: Any, arguments: Any) -> str:
        return str(function.__name__)

    def update(self, batch: Any, **arguments: Any) -> None:
        pass


def step_of(
    *,
    updates: int = 2,
    stale: bool = False,
    seed: int = 3,
    number: int = 1,
    config: Any = None,
    records_routes: bool = False,
) -> TrainerStep:
    """On an actor that tells what it is asked."""
    unused: Any = None
    settings: Any = SimpleNamespace(
        seed=seed,
        trainer=SimpleNamespace(updates_per_step=updates, profile_of=lambda step: None),
        rollout=SimpleNamespace(sampling=SimpleNamespace(temperature=0.7)),
        records_routes=records_routes,
        reference_is_base=False,
    )
    controllers: Any = SimpleNamespace(config=lambda step: config or GRPOSettings())
    roles: Any = SimpleNamespace(actor=Actor(), reference=None, teacher=None, scalar={}, models={})
    phases: Any = SimpleNamespace(enter=lambda phase: None, phase="reward")
    return TrainerStep(
        settings,
        unused,
        roles,
        source=unused,
        scoring=unused,
        weights=unused,
        phases=phases,
        controllers=controllers,
        contract=unused,
        number=number,
        version=number,
        record=StepRecord(stale=stale),
    )


def current(step: TrainerStep) -> Any:
    batch: Any = Batch()
    columns: Any = step.current_logprobs(batch)
    return columns["current_logprobs"]


def test_the_current_log_probs_are_the_old_ones_until_the_first_update() -> None:
    step = step_of()
    assert current(step) == current(step) == "old_logprobs"
    batch: Any = Batch()
    step._models.update_actor(batch, ActorUpdate(GRPOSettings(), 0.7, serving=0, whiten=None, stale=False))
    assert current(step) == current(step) == "forward pass at 0.7"


def test_the_pass_of_the_old_log_probs_records_routes_that_updates_replay() -> None:
    batch: Any = Batch()
    assert step_of().logprobs(batch) == {"old_logprobs": "forward pass at 0.7"}
    for step in (step_of(records_routes=True), step_of(records_routes=True, stale=True)):
        assert step.logprobs(batch) == {"old_logprobs": "forward pass at 0.7 with routes"}
    assert step_of(stale=True).logprobs(batch) == {}


def test_the_current_log_probs_are_asked_for_where_there_are_no_old_ones() -> None:
    """Nobody computes them with one update a step or given responses. Stale ones would be of another policy."""
    call = "forward pass at 0.7"
    assert current(step_of(updates=1)) == current(step_of(stale=True)) == current(step_of(config=DPOSettings())) == call
    assert current(step_of(config=DPOSettings(pairs="group"))) == "old_logprobs"


def test_old_log_probs_are_another_column_or_missed_by_name() -> None:
    batch = SampleBatch.from_generations(
        prompts=[[1]],
        responses=[[5, 6]],
        logprobs=[[-1.0, -2.0]],
        sample_ids=[0],
        group_ids=[0],
        prompt_indices=[0],
        policy_versions=[0],
        finish_reasons=["stop"],
    )
    with pytest.raises(ValueError, match=r"the samples have no old_logprobs; expected Step\.logprobs"):
        old_logprobs(batch, config=GRPOSettings())
    columns = old_logprobs(batch.replace(old_logprobs=torch.tensor([-1.5, -2.5])), config=GRPOSettings())
    assert columns.tokens["old_logprobs"].tolist() == [-1.5, -2.5]


def failing(monkeypatch: pytest.MonkeyPatch, on_failure: str, *failed: tuple[bool, ...]) -> tuple[TrainerStep, Any]:
    """A step, and two samples on which its function fails, or not, each time that they are scored."""
    function = RewardFunctionConfig(name="mine", path="length", on_failure=on_failure)  # type: ignore[arg-type]
    results = iter([result_of(rows, dropped=on_failure == "drop") for rows in failed])
    monkeypatch.setattr("hybridflow.trainer.operations.scoring.reward_result", lambda scored: next(results))
    step: Any = step_of()
    prompts = Prompts([Example("1+1=", "2")], [[1]])
    step.run = SimpleNamespace(train=prompts, tokenizer=None)
    step.source = SimpleNamespace(rewards=lambda what, samples: None)
    functions: Any = {"reward": SimpleNamespace(score=lambda *_, **__: None)}
    step.scoring = SampleScoring(functions, {"reward": RewardConfig(functions=(function,))}, {}, {}, None, prompts)
    step.settings.passing, step.settings.texts = None, (0, 0)
    step.settings.trainer.mini_batches = 3
    step.__post_init__()
    batch = RemoteBatch.of(
        SampleBatch.from_generations(
            prompts=[[1]] * 2,
            responses=[[5, 6]] * 2,
            logprobs=[[-1.0, -2.0]] * 2,
            sample_ids=[0, 1],
            group_ids=[0, 0],
            prompt_indices=[0, 0],
            policy_versions=[0, 0],
            finish_reasons=["stop"] * 2,
        )
    )
    return step, batch


def result_of(failed: tuple[bool, ...], *, dropped: bool) -> RewardResult:
    gone = torch.tensor(failed)
    values = torch.arange(float(len(failed))).masked_fill(gone, math.nan if dropped else 0.0)
    failures = tuple(RewardFailure("mine", sample, "raised ValueError") for sample in gone.nonzero()[:, 0].tolist())
    return RewardResult(values, {"mine": values}, {"mine": gone}, gone & dropped, failures)


@pytest.mark.processes
def test_rewards_wait_for_no_column_of_a_model(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions score while models still compute log-probs and values of the same samples."""
    step, batch = failing(monkeypatch, "drop", (False, False))
    scored: list[RemoteBatch] = []
    functions: Any = step.scoring.functions["reward"]
    functions.score = lambda given, **_: scored.append(given)
    columns: Any = SimpleNamespace(refs=[], nodes=[], shard_indices=[], sample_ids=batch.per_sample["sample_ids"])
    pending = batch.with_columns(ref_logprobs=columns)
    step.rewards(pending, partial=True)
    assert list(pending.inputs) == [columns] and [list(given.inputs) for given in scored] == [[]]


BOTH = (True, True)
LAST = (False, True)
ON_ALL = r"reward 'mine' .* failed on all %d samples of a step: it raised ValueError"


@pytest.mark.processes
def test_a_part_of_a_step_may_get_no_reward_and_the_whole_may_not(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rounds of dynamic sampling may draw a single prompt."""
    step, batch = failing(monkeypatch, "drop", BOTH, BOTH)
    assert len(step.rewards(batch, partial=True)) == 0
    assert "reward/mean" not in step.values
    with pytest.raises(UserError, match=ON_ALL % 2):
        step.rewards(batch)


@pytest.mark.processes
def test_all_parts_of_a_step_may_not_be_without_a_reward_of_a_function(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are there if a failure has a value, and would be trained on."""
    step, batch = failing(monkeypatch, "value", BOTH, BOTH)
    assert len(step.rewards(batch, partial=True)) == len(step.rewards(batch, partial=True)) == 2
    with pytest.raises(UserError, match=ON_ALL % 4):
        step.update(Experience(batch))
    step, batch = failing(monkeypatch, "value", BOTH, LAST)
    step.rewards(batch, partial=True)
    step.rewards(batch, partial=True)
    with pytest.raises(EngineError, match="2 samples are left to train on, expected at least 3"):
        step.update(Experience(batch))


def test_choices_at_random_are_those_of_run_step_and_name() -> None:
    def drawn(name: str = "clip_cov", **of_step: Any) -> int:
        return int(torch.randint(2**62, (), generator=step_of(**of_step).generator(name)))

    assert drawn() == drawn()
    assert len({drawn(), drawn(seed=4), drawn(number=2), drawn("other")}) == 4


def an_update(loss: float, *, applied: bool) -> list[Update]:
    """The report of the only rank."""
    statistics = Statistics({metrics.TRAIN_LOSS: torch.tensor(loss, dtype=torch.float64)})
    memory: Any = {"peak_memory_bytes": 1, "peak_reserved_bytes": 1, "on_gpu": False, "peak_flops": None}
    times: Any = {"devices": 1, "flops": 1.0, "seconds": 1.0, "optimizer_seconds": 0.1}
    return [Update(statistics, 1.0, 1e-6, applied, tokens=4, positions=4, **times, **memory)]


def test_a_step_reports_the_updates_of_all_experiences_that_it_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = step_of()
    step.weights = SimpleNamespace(before_update=lambda version: None)
    step.controllers.metrics, step.controllers.learn = lambda step: {}, lambda values, samples: None
    step.settings.rollout.sampling_table = SimpleNamespace(longest_response=8)
    step.roles.learning = {}
    monkeypatch.setattr(step, "_check", lambda batch: None)
    for made in ([an_update(1.0, applied=True), an_update(3.0, applied=True)], [an_update(5.0, applied=False)]):
        plan = SimpleNamespace(split=(), mini_batches=made, actor=range(len(made)))
        monkeypatch.setattr("hybridflow.trainer.step.UpdatePlan", SimpleNamespace(of=lambda *_, plan=plan, **__: plan))
        step._models = SimpleNamespace(trained=lambda plan: (), run=lambda plan, *_: {"actor": list(plan.mini_batches)})
        step.update(Experience(RemoteBatch({"sample_ids": torch.tensor([1, 2])}, [])))
    assert [ranks[0].applied for ranks in step.updates] == [True, True, False]
    assert step.values[metrics.TRAIN_LOSS] == 3.0 and step.values[metrics.ACTOR.skipped_updates] == 1
