"""Makes steps of a run again from its store, and says how what comes out lies to what the run has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engine3d.checkpoint.manifest import find_checkpoints, remove_checkpoint, step_directory
from engine3d.checkpoint.reading.compare import TensorsCompared, compare_checkpoints
from engine3d.durable import naming
from engine3d.errors import UserError
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.checkpoint.driver_state import RandomState, RunState
from hybridflow.checkpoint.manager import Checkpoints
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.planning.data.prompts import prompt_order
from hybridflow.rollout.rollouts import Rollout
from hybridflow.rollout.source import RolloutSource
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.operations.scoring import SampleScoring
from hybridflow.trainer.operations.settings import StepSettings
from hybridflow.trainer.replaying.comparison import (
    TOLERANCES,
    MetricsCompared,
    Verdict,
    compare_metrics,
    worst,
)
from hybridflow.trainer.replaying.plan import Original, ReplayPlan
from hybridflow.trainer.replaying.stored_step import StoredStep, all_learned
from hybridflow.trainer.startup.role_startup import Roles, start_roles, wait_for
from hybridflow.trainer.startup.rollout_source import stream_plan
from hybridflow.trainer.startup.run_setup import Run, open_run
from hybridflow.trainer.step import TrainerStep
from hybridflow.trainer.step_record import Scores, rollout_metrics
from hybridflow.trainer.weight_sync import NoEngines

RESULT = "replay.json"
"""The file of a replay's result, in its directory."""


@dataclass(frozen=True)
class StepCompared:
    """A step that was made again.

    Args:
        metrics: compared with those of the run.
        digests: whether the actor's weights have the digests of the run's on every rank; None where that is not known,
            or ranks hold other weights.
    """

    metrics: MetricsCompared
    digests: bool | None


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Args:
        plan: that was followed.
        steps: each that was made again.
        tensors: of the checkpoint after the last, by role; none where the run has kept none.
    """

    plan: ReplayPlan
    steps: Mapping[int, StepCompared]
    tensors: Mapping[str, TensorsCompared] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the last step's metrics and weights."""
        last = self.steps[self.plan.step]
        return worst(last.metrics.verdict, self._weights(last))

    def _weights(self, last: StepCompared) -> Verdict:
        tolerance = TOLERANCES[self.plan.recipe.train.dtype]
        verdicts: list[Verdict] = []
        for compared in self.tensors.values():
            known = compared.of_change == compared.of_change  # is not nan
            near = compared.of_change <= tolerance.of_change if known else compared.of_weights <= tolerance.of_weights
            verdicts.append("same" if not compared.differing else "close" if near else "different")
        if not verdicts and last.digests is False:
            return "close" if self.plan.inexact else "different"  # by how much weights differ is not known
        return worst(*verdicts)

    @property
    def as_expected(self) -> bool:
        """The same bits, or within the tolerance where the same bits are not expected."""
        return self.verdict == "same" or (self.verdict == "close" and bool(self.plan.inexact))

    def lines(self) -> list[str]:
        """Describe the result."""
        lines = []
        for number, step in self.steps.items():
            lines += _step_lines(number, step)
        for role, tensors in self.tensors.items():
            lines.append(_tensors_line(self.plan, role, tensors))
        if not self.tensors and all(step.digests is None for step in self.steps.values()):
            lines.append("weights: not compared: the run has no checkpoint of this step, and no digests of this layout")
        tolerance = TOLERANCES[self.plan.recipe.train.dtype]
        within = (
            f"relative {tolerance.relative:g} + absolute {tolerance.absolute:g} of a figure, "
            f"{tolerance.of_change:g} of what the steps have changed of the weights"
        )
        said = {
            "same": "the same bits",
            "close": f"not the same bits, but within the tolerance ({within})",
            "different": f"different, beyond the tolerance ({within})",
        }
        return [*lines, f"replay: step {self.plan.step}: {said[self.verdict]}"]


def replay(plan: ReplayPlan) -> Replayed:
    """Make the steps of a plan again.

    Raises:
        UserError: something that the user can put right.
        EngineError: a role failed; everything that was started is gone.
    """
    with open_run(plan.recipe) as opened:
        recipe, run, sinks = opened.recipe, opened.run, opened.sinks
        with Checkpoints(recipe, run.model_directory, sinks) as checkpoints, start_roles(recipe, run) as roles:
            wait_for(roles, *roles.starting)
            made = _Replaying(plan, ReplayedRun(recipe, run, roles, opened.phases), sinks)
            state = made.begin()
            steps = {number: made.step(number, original) for number, original in plan.steps.items()}
            if plan.after is not None:
                opened.phases.enter("save")
                checkpoints.save(roles.learning, replace(state, step=plan.step, policy_version=made.version))
                checkpoints.wait()
        opened.phases.enter("end")
        result = Replayed(plan, steps, _tensors(plan, recipe.checkpoint_directory))
        with naming(run.directory / RESULT):
            (run.directory / RESULT).write_text(json.dumps(_document(result), indent=1) + "\n")
    return result


class ReplayedRun:
    """A run whose steps are made again: nothing generates, and controllers begin as in a new run.

    Args:
        recipe, run, roles, phases: of the run.
    """

    def __init__(self, recipe: Recipe, run: Run, roles: Roles, phases: PhaseFile) -> None:
        self.recipe, self.run, self.roles, self.phases = recipe, run, roles, phases
        self.controllers = Controllers(recipe.algorithm)
        self.contract = Contract.of(recipe.trainer)
        order = prompt_order(recipe.data, recipe.order_seed, recipe.trainer.prompts_per_step, run.train)
        self.settings = StepSettings.of(recipe)
        self.source = RolloutSource(stream_plan(recipe, run.train, 0), {}, recipe.limits, run.train, order, None)

    def step(self, number: int, version: int) -> ReplayedStep:
        """The step of this number, which makes the weights of `version`."""
        return ReplayedStep(
            self.settings,
            self.run,
            self.roles,
            self.source,
            SampleScoring.of(self.roles, {}, {}, self.run.train),
            NoEngines(),
            self.phases,
            self.controllers,
            self.contract,
            number,
            version,
        )


class _Replaying:
    """The steps, one after another."""

    def __init__(self, plan: ReplayPlan, replayed: ReplayedRun, sinks: Metrics) -> None:
        self._plan, self._replayed, self._sinks = plan, replayed, sinks
        self.version = 1

    def begin(self) -> RunState:
        """Restore the driver's state, and return it."""
        replayed, resumption = self._replayed, self._replayed.run.resumption
        state = resumption.state if resumption is not None else None
        if state is None:
            RandomState.seed(replayed.recipe.seed)
            return _first_state(replayed)
        replayed.controllers.load_state_dict(state.algorithm)
        if replayed.controllers.replay is not None:
            replayed.controllers.replay.restore(state.replay)
        self.version = state.policy_version
        state.random.restore()
        return replace(state, groups=None)

    def step(self, number: int, original: Original) -> StepCompared:
        """Make a step again, and compare its metrics."""
        replayed, plan = self._replayed, self._plan
        replayed.run.check_directory()
        replayed.phases.step = number
        step = replayed.step(number, self.version + 1)
        with Timer(step.values, metrics.TRAIN_STEP_TIME):
            if original.path is not None and original.metadata is not None:
                algorithm = replayed.recipe.algorithm
                keeps = algorithm.kept_samples > 0
                stored = StoredStep.read(original.path, keeps_samples=keeps)
                step.make_again(
                    stored, all_learned=all_learned(algorithm, replayed.recipe.samples_per_step, original.metadata)
                )
                replayed.contract.learned(step.record.trained[0])
        self.version += 1
        digests = tuple(replayed.roles.actor.weights_digest().result())
        self._sinks.log(number, step.values)
        tolerance = TOLERANCES[replayed.recipe.train.dtype]
        compared = compare_metrics(original.metrics, step.values, tolerance, same_layout=not plan.changed)
        comparable = original.digests and len(digests) == len(original.digests)
        same = digests == original.digests if comparable and (not plan.changed or digests == original.digests) else None
        return StepCompared(compared, same)


def _first_state(replayed: ReplayedRun) -> RunState:
    return RunState(
        step=0,
        policy_version=1,
        samples_drawn=0,
        sampler=replayed.source.snapshot().order,
        updates=0,
        steps_without_update=0,
        random=RandomState.capture(),
        run=replayed.run.identity,
        inputs=replayed.run.inputs,
    )


def _tensors(plan: ReplayPlan, saved_in: Path) -> dict[str, TensorsCompared]:
    """Differences between the run's checkpoint after the step and the replay's, by role; the replay's is removed."""
    made = step_directory(saved_in, plan.step)
    if plan.after is None or made not in find_checkpoints(saved_in)[0]:
        return {}
    roles = plan.recipe.trained_roles
    compared = {role: compare_checkpoints(plan.after, made, role, before=plan.checkpoint) for role in roles}
    try:
        remove_checkpoint(made)
    except OSError as error:
        log.warning(f"replay: {made} could not be removed: {error.strerror}")
    return compared


def _step_lines(number: int, step: StepCompared) -> list[str]:
    compared = step.metrics
    said = f"step {number}: {compared.compared} figures: "
    if not compared.differing:
        said += "the same bits"
    else:
        name, before, now = compared.differing[0]
        outside = f", {len(compared.outside)} of them beyond the tolerance" if compared.outside else ""
        said += f"{len(compared.differing)} differ{outside}; most {name}: {before:.9g} in the run, {now:.9g} now"
    if step.digests is not None:
        said += f"; the actor's weights: {'the same bits' if step.digests else 'other bits'} (digests of all ranks)"
    lines = [said]
    if compared.not_made:
        names = ", ".join(compared.not_made)
        lines.append(f"step {number}: not compared, as a replay reads the samples and draws none: {names}")
    return lines


def _tensors_line(plan: ReplayPlan, role: str, tensors: TensorsCompared) -> str:
    said = f"checkpoint of step {plan.step}: {tensors.tensors} tensors of {role} (weights and moments): "
    if not tensors.differing:
        return said + "the same bits"
    change = f"; their difference is {tensors.of_change:.3g} of what the steps have changed"
    change = change if tensors.of_change == tensors.of_change else ""
    most = (
        f"; largest difference of a weight {tensors.largest:.3g} ({tensors.largest_in})" if tensors.largest_in else ""
    )
    return f"{said}{len(tensors.differing)} differ{most}{change}, {tensors.of_weights:.3g} of the weights"


def _document(replayed: Replayed) -> dict[str, object]:
    plan = replayed.plan
    return {
        "run": str(plan.run),
        "step": plan.step,
        "base": plan.base,
        "changed": list(plan.changed),
        "inexact": list(plan.inexact),
        "verdict": replayed.verdict,
        "as_expected": replayed.as_expected,
        "steps": {str(number): asdict(step) for number, step in replayed.steps.items()},
        "tensors": {role: asdict(tensors) for role, tensors in replayed.tensors.items()},
    }


@dataclass
class ReplayedStep(TrainerStep):
    """One step of a run, once more."""

    def make_again(self, stored: StoredStep, *, all_learned: bool) -> None:
        """Make all of its updates.

        Args:
            stored: samples that it has trained on.
            all_learned: true if these are all samples that were drawn for it: then metrics of samples are computed
                again too.
        """
        algorithm = load(self.config.name)
        algorithm.learn(self, self.experience(stored, all_learned=all_learned))

    def experience(self, stored: StoredStep, *, all_learned: bool) -> Experience:
        """Build the experience: the samples with the columns that models compute, and advantages."""
        serving, batch = self.version - 1, RemoteBatch.of(stored.batch)
        algorithm = load(self.config.name)
        if self.config.needs_engines:
            versions = stored.batch.policy_versions
            self.record.stale = self.contract.allows_older or bool((versions < serving).any())
        self.record.recalled.update(stored.batch.sample_ids[stored.recalled].tolist())
        self.record.tokens = int(batch.lengths.sum())
        if all_learned:
            self.values |= rollout_metrics([Rollout(batch, None)], serving) | _score_metrics(stored)
        batch = algorithm.read(self, batch)
        experience = Experience(batch, baselines=stored.baselines)
        if self.config.compares_with_left_out:
            if stored.advantages is None:
                raise UserError(f"replay: step {self.number}: the samples have no advantages, expected one of each")
            return Experience(batch.with_per_sample(advantages=stored.advantages))
        return algorithm.with_advantages(self, experience)


def _score_metrics(stored: StoredStep) -> dict[str, float]:
    """Metrics of rewards and costs, as a step logs them of all its samples."""
    values: dict[str, float] = {}
    batch = stored.batch
    sums: dict[str, Any] = {"reward": batch.rewards, "cost": batch.costs}
    for what, total in sums.items():
        if total is not None:
            kept = torch.ones(len(batch), dtype=torch.bool)
            scores = Scores(batch.sample_ids, total, kept, None, stored.by_name.get(f"{what}/model"))
            values |= scores.metrics(what)
    for name, column in stored.by_name.items():
        if name.rpartition("/")[0] in stored.by_name:  # a metric of a function, or a count
            continue
        values[f"{name}/mean"] = float(column[~column.isnan()].mean())
    return values
