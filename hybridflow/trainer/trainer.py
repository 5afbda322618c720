"""The loop: steps of the algorithm, each with its transfer of weights; evaluations, and checkpoints on the way."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from engine3d.checkpoint.hf import export_checkpoint
from engine3d.cleaning import cleaning
from engine3d.errors import DamagedCheckpointError, EngineError
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.checkpoint.driver_state import Measurements, RandomState, RunState
from hybridflow.checkpoint.manager import Checkpoints
from hybridflow.checkpoint.resume import Resumption, inexact_because
from hybridflow.checkpoint.set_results import Best, MeasuredSet, summary_of_best, summary_of_sets
from hybridflow.cluster.devices.device_monitor import DeviceMonitor
from hybridflow.cluster.processes.orphans import remove_orphans
from hybridflow.cluster.processes.termination import Abandoned, termination
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.recipe import Recipe
from hybridflow.data.sampler import PromptOrder
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.metrics.timeline import timeline
from hybridflow.planning.prompts import prompt_order
from hybridflow.roles.offload import offload_metrics, offloaded_groups
from hybridflow.rollout.batch_source import BatchPlan, BatchSource
from hybridflow.rollout.generator import Generator
from hybridflow.rollout.source import RolloutSnapshot, RolloutSource
from hybridflow.rollout.stream_source import StreamSource, stream_plan
from hybridflow.rundir.evaluation_texts import forget_after
from hybridflow.rundir.file_names import DEVICES, EVALUATIONS, EVENTS, EXPORT, SAMPLE_STORE, TIMELINE
from hybridflow.rundir.lock import WEIGHTS, move_aside
from hybridflow.rundir.progress import PhaseFile
from hybridflow.rundir.run_record import record_end
from hybridflow.trainer.closing import results
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.engine_restarts import EngineRestarts
from hybridflow.trainer.evaluations import Evaluations
from hybridflow.trainer.event_log import Event, EventLog
from hybridflow.trainer.given_responses import GivenSource
from hybridflow.trainer.pair_evaluation import PairMeasurer
from hybridflow.trainer.resume import resumed_draws
from hybridflow.trainer.role_startup import Roles, start_roles, wait_for
from hybridflow.trainer.run_setup import OpenRun, Run, open_run
from hybridflow.trainer.sample_store import SampleStore
from hybridflow.trainer.set_evaluation import SetMeasurer
from hybridflow.trainer.sft_warmup import warm_up
from hybridflow.trainer.step import StepSettings, TrainerStep
from hybridflow.trainer.weight_sync import NoEngines, WeightSync

_MOST_STEPS_WITHOUT_UPDATE = 3
_TIMELINE_EVERY_S = 30.0
_ACRONYM = 5
"""Letters of an algorithm's name that is written in capitals."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        directory: of the run.
        first, last: the first and the last measurement of each held-out set, by its name.
    """

    directory: Path
    first: dict[str, MeasuredSet]
    last: dict[str, MeasuredSet]


def train(recipe: Recipe) -> Outcome:
    """Run a recipe to its end, and say how much better the model is.

    Raises:
        UserError: something that the user can put right.
        EngineError: a role failed; everything that was started is gone.
    """
    while True:
        with open_run(recipe) as opened:
            run = opened.run
            try:
                found, best = _run(opened)
            except DamagedCheckpointError as error:
                fall_back(opened, error)
                continue
            opened.phases.enter("end")
            measured = [*summary_of_sets(found.first, found.last), *summary_of_best(best)]
            with cleaning("hybridflow: the result could not be recorded", needed=False):
                record_end(run.directory, measured)
        for line in (*measured, *results(opened.recipe)):
            log.info(line)
        return Outcome(run.directory, found.first, found.last)


def _run(opened: OpenRun) -> tuple[Measurements, Best | None]:
    """Lines on the evaluations of a finished run, and on the best checkpoint."""
    recipe, run = opened.recipe, opened.run
    resumed = run.resumption.state if run.resumption is not None else None
    if resumed is not None and resumed.step >= recipe.trainer.steps and not run.evaluation_due:
        export_finished(recipe, run)
        return resumed.measurements, resumed.best
    with start_trainer(opened) as trainer:
        return trainer.run(), trainer.checkpoints.best


def fall_back(opened: OpenRun, error: DamagedCheckpointError) -> None:
    """Put the checkpoint aside that ranks could not load, so that `resume=auto` takes the one before it.

    Raises:
        DamagedCheckpointError: the recipe names this very checkpoint.
    """
    resumption = opened.run.resumption
    if opened.recipe.resume != "auto" or resumption is None:
        error.checkpoint = resumption.directory if resumption is not None else None
        raise error
    log.warning(f"resume: {error}; now {move_aside(resumption.directory)}, and the one before it is tried")


@contextmanager
def start_trainer(opened: OpenRun) -> Iterator[Trainer]:
    """Start the roles, and end them when the block is left."""
    recipe, run, sinks = opened.recipe, opened.run, opened.sinks
    timeline.clear()
    resumed = run.resumption.directory if run.resumption is not None else None
    if recipe.checkpoint.save_interval is None:
        log.info(
            "checkpoints: none, so that this run cannot be resumed; checkpoint.save_interval=10 saves every ten steps"
        )
    elif reasons := inexact_because(recipe):
        log.info(f"checkpoints: a resumed run may differ from this one by {'; '.join(reasons)}")
    with (
        # Entered first and so left last: when the groups are gone, it waits for them no more.
        ThreadPoolExecutor(1, thread_name_prefix="eval") as evaluating,
        Checkpoints(recipe, run.model_directory, sinks, resumed) as checkpoints,
        start_roles(recipe, run) as roles,
        DeviceMonitor(
            (bundle for group in roles.groups for bundle in group.pool.bundles),
            recipe.metrics.device_interval_s,
            run.directory / DEVICES,
        ) as devices,
        _weight_sync(recipe, run, roles) as weights,
        SampleStore(recipe.samples, run.directory / SAMPLE_STORE, run.steps_done) as samples,
        EventLog(run.directory / EVENTS, run.steps_done, wanted=recipe.samples.events) as events,
    ):
        checkpoints.after = samples.written  # a run that goes on from one has the samples of the steps before it
        trainer = Trainer(
            recipe, run, roles, weights, sinks, checkpoints, opened.phases, devices, samples, events, evaluating
        )
        try:
            yield trainer
        finally:
            trainer.source.close()
            write_timeline(run.directory)


def _weight_sync(recipe: Recipe, run: Run, roles: Roles) -> WeightSync | NoEngines:
    if roles.rollout is None:
        return NoEngines()
    spec = initial_spec(recipe)
    return WeightSync(roles.actor, roles.rollout, spec, recipe.rollout, run.directory / WEIGHTS, roles.lent)


def write_timeline(directory: Path) -> None:
    """Write the run's timeline; what keeps it from being written neither fails the run nor hides its failure."""
    path = directory / TIMELINE
    with cleaning(f"hybridflow: {path} could not be written", needed=False):
        timeline.write(path)


def export_finished(recipe: Recipe, run: Run) -> None:
    """Export a run that has done all its steps, from its last checkpoint, if it has not been."""
    assert run.resumption is not None
    remove_orphans()  # perhaps of this run, killed after its last step
    directory = run.directory / EXPORT
    state, steps = run.resumption.state, recipe.trainer.steps
    past = f"; the checkpoint is after step {state.step}" if state is not None and state.step > steps else ""
    log.info(f"resume: all {steps} steps are done{past}; a larger trainer.steps trains on")
    if recipe.trainer.export and not directory.exists():
        export_checkpoint(
            run.resumption.directory, directory, dtype=recipe.train.dtype, verify=recipe.checkpoint.verify
        )


def _steps_sentence(recipe: Recipe, steps_done: int) -> str:
    """Describe the steps of a run in one sentence, such as "GRPO: 120 steps of 64 prompts x 8 samples".

    Args:
        recipe: of the run.
        steps_done: after which it resumes; 0 of a fresh start.
    """
    name, trainer = recipe.algorithm.name, recipe.trainer
    name = name.upper() if len(name) <= _ACRONYM else name.rpartition("/")[2]
    steps = f"{trainer.steps:,} steps of"
    if steps_done:
        steps = f"steps {steps_done + 1:,} to {trainer.steps:,}, each of"
    if not recipe.algorithm.needs_engines:
        return f"{name}: {steps} {trainer.prompts_per_step:,} examples"
    return f"{name}: {steps} {trainer.prompts_per_step:,} prompts x {recipe.rollout.samples_per_prompt:,} samples"


def rollout_source(
    recipe: Recipe, run: Run, roles: Roles, weights: WeightSync | NoEngines, order: PromptOrder
) -> RolloutSource:
    """The source of a run's rollouts, as the recipe has it."""
    generator = Generator(roles.rollout, weights.before_generation)
    if recipe.rollout.stream is None:
        return BatchSource(BatchPlan.of(recipe), run.train, order, generator)
    restarts = None
    if recipe.rollout.stream.engine_restarts and roles.rollout is not None:
        assert isinstance(weights, WeightSync)
        restarts = EngineRestarts(roles.rollout, weights)
    handles, lending = roles.engine_handles, roles.lending(recipe)
    plan = stream_plan(recipe, run.train, len(handles.actors), lending)
    running = order, handles, generator, roles.check_engines, lending, restarts
    return StreamSource(plan, recipe.functions, recipe.limits, run.train, *running)


class Trainer:
    """One run's loop over its roles."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        roles: Roles,
        weights: WeightSync | NoEngines,
        sinks: Metrics,
        checkpoints: Checkpoints,
        phases: PhaseFile,
        devices: DeviceMonitor,
        samples: SampleStore,
        events: EventLog,
        evaluating: Executor,
    ) -> None:
        self.recipe, self.facts, self.roles, self.weights, self.phases = recipe, run, roles, weights, phases
        self.sinks, self.checkpoints, self.devices, self.samples = sinks, checkpoints, devices, samples
        self.events = events
        self.order = prompt_order(recipe, run.train)
        self.source = rollout_source(recipe, run, roles, weights, self.order)
        self.controllers = Controllers(recipe.algorithm)
        self.contract = Contract.of(recipe.trainer)
        self.given = GivenSource(recipe, run, roles.actor) if not recipe.algorithm.needs_engines else None
        self.algorithm = load(recipe.algorithm.name)
        self.steps_done = 0
        self.version = 0
        self.updates = 0
        self.steps_without_update = 0
        self.timeline_shown = -math.inf
        measurer = SetMeasurer.of_run(recipe, run, roles, self.source)
        pairs = PairMeasurer(self.given, self.controllers) if self.given is not None else None
        self.evaluations = Evaluations(
            recipe.sets, recipe.trainer, recipe.limits, phases, sinks, measurer, pairs, evaluating
        )

    def run(self) -> Measurements:
        """Warm up and train, or go on; what the evaluations of the run have measured."""
        settings = self.recipe.trainer
        if self.start():
            self.evaluate(0)
            self.save(0)
        elif self.facts.evaluation_due:
            self.evaluate_resumed()
        if self.steps_done < settings.steps:
            self.sinks.begin("train", _steps_sentence(self.recipe, self.steps_done))
        with termination.saves(self.recipe.checkpoint.on_stop_s):
            for number in range(self.steps_done + 1, settings.steps + 1):
                self.step_or_end(number)
                self.evaluate(number)
                self.save(number)
                if termination.asked:
                    self.end_saved(self.state())
            self.phases.enter("save")
            self.checkpoints.wait()
        if settings.export:
            self.roles.actor.export(self.facts.directory / EXPORT).result()
        return self.evaluations.measurements

    def evaluate(self, step: int) -> None:
        """Evaluate the policy of after a step on each held-out set for which it is time; 0 is before the first."""
        self.evaluations.evaluate(step, self.version)

    def evaluate_resumed(self) -> None:
        """The evaluation that was due when the checkpoint was saved; it may be beside the next step again."""
        self.evaluate(self.steps_done)
        if self.evaluations.pending is None:
            drawn = self.source.reserve_samples(0)
            self.checkpoints.evaluated(self.steps_done, self.evaluations.measurements, drawn)

    def start(self) -> bool:
        """All that comes before the next step: the roles are there, and the engines serve the actor's weights.

        Returns:
            Whether the run begins; it goes on otherwise.
        """
        resumption = self.facts.resumption
        self.phases.enter("start" if resumption is None else "load")
        wait_for(self.roles, "actor")
        found: dict[str, str] = self.roles.starting["actor"].result()[0]
        log.info("  ".join(f"{name} {version}" for name, version in found.items()))
        if resumption is not None and resumption.state is not None:
            self.resume(resumption, resumption.state)
            return False
        self.begin()
        return True

    def begin(self) -> None:
        """Warm up, and bring the engines to the weights that the first step begins with."""
        RandomState.seed(self.recipe.seed)
        if self.recipe.warmup is not None:
            warm_up(self.recipe, self.facts, self.roles, self.phases, self.sinks)
        wait_for(self.roles, *self.roles.starting)
        digests = self.digests()
        self.synchronise({})
        self.events.write(0, [self.weights_event(digests)])
        self.source.open(self.version, steps_left=self.recipe.trainer.steps)
        if self.given is not None:
            self.phases.enter("infer")
            self.given.measure()

    def resume(self, resumption: Resumption, state: RunState) -> None:
        """Restore the run's state of `state`; engines serve the same version of the weights."""
        if (self.facts.directory / EXPORT).exists():
            move_aside(self.facts.directory / EXPORT)  # that of the same run, when it was to end sooner
        wait_for(self.roles, *self.roles.starting)
        draws = resumed_draws(self.recipe, self.order.sampler(), self.source, resumption, state)
        for note in draws.notes:
            log.info(note)
        self.source.restore(draws.snapshot)
        self.contract.begin(draws.snapshot.order["position"], draws.ahead)
        self.controllers.load_state_dict(state.algorithm)
        if self.controllers.replay is not None:
            self.controllers.replay.restore(None if resumption.accepted else state.replay)
        if self.given is not None:
            self.given.load_state_dict(state.kept)
        self.steps_done = self.phases.step = state.step
        self.updates = state.updates
        self.steps_without_update = state.steps_without_update
        self.evaluations.measurements = state.measurements
        self.checkpoints.go_on(state.best)
        forget_after(self.facts.directory / EVALUATIONS, state.step)
        self.version = state.policy_version - 1
        self.synchronise({})
        self.events.write(state.step, [{"event": "resumed", "version": self.version}])
        self.source.open(self.version, steps_left=self.recipe.trainer.steps - state.step)
        state.random.restore()

    def state(self, rollouts: RolloutSnapshot | None = None) -> RunState:
        """All that the driver knows and later steps depend on.

        Args:
            rollouts: state of the source of rollouts; the current one if None.
        """
        rollouts = rollouts or self.source.snapshot()
        replay, samples = self.controllers.replay, rollouts.samples_drawn
        if (due := self.evaluations.pending) is not None and due.first_sample is not None:
            samples = due.first_sample  # a resumed run evaluates first
        measured = self.evaluations.measurements
        return RunState(
            step=self.steps_done,
            policy_version=self.version,
            samples_drawn=samples,
            sampler=rollouts.order,
            algorithm=self.controllers.state_dict(),
            updates=self.updates,
            steps_without_update=self.steps_without_update,
            first_measured=measured.first,
            last_measured=measured.last,
            evaluation_due=due is not None,
            random=RandomState.capture(),
            run=self.facts.identity,
            inputs=self.facts.inputs,
            groups=rollouts.groups,
            replay=replay.samples if replay is not None else None,
            kept=self.given.state_dict() if self.given is not None else {},
        )

    def save(self, step: int) -> None:
        """Look after the checkpoint that is under way, and begin one where it is due, or a signal has asked for it."""
        self.checkpoints.poll()
        if self.checkpoints.due(step) or self.asked_to_save():
            self.phases.enter("save")
            self.checkpoints.save(self.roles.learning, self.state())

    def asked_to_save(self) -> bool:
        """Whether SIGUSR1 has come, in a run that has a place for checkpoints."""
        if not termination.take_save_request():
            return False
        if self.recipe.checkpoint.save_interval is None:
            log.warning("SIGUSR1: this run saves no checkpoints (checkpoint.save_interval=null)")
            return False
        return True

    def step_or_end(self, number: int) -> None:
        """One step; the run ends where a signal asks for it before the models have begun to learn from it."""
        if self.recipe.checkpoint.on_stop_s is None:
            self.step(number)
            return
        before = self.state(RolloutSnapshot({}, 0))  # with that of the source, if it comes to it
        self.source.begin_step()
        try:
            self.step(number)
        except Abandoned:
            log.info(f"step {number}: abandoned in phase {self.phases.phase}, as the run is to end")
            self.source.abandon()
            rollouts = self.source.snapshot()
            samples = before.samples_drawn if before.evaluation_due else rollouts.samples_drawn
            self.end_saved(replace(before, sampler=rollouts.order, samples_drawn=samples, groups=rollouts.groups))

    def end_saved(self, state: RunState) -> NoReturn:
        """Save, if that was not done yet, and end the run as a signal has asked.

        Raises:
            Terminated: always.
        """
        self.phases.enter("save")
        if not (self.checkpoints.begun(state.step) or self.checkpoints.has(state.step)):
            self.checkpoints.save(self.roles.learning, state)
        self.checkpoints.wait()
        whole = self.checkpoints.has(state.step)
        termination.end_asked(f"the checkpoint of step {state.step} is whole" if whole else None)

    def step(self, number: int) -> None:
        """One step of the algorithm, and the new weights to the engines."""
        step = self.next_step(number)
        self.learn(step, lambda: self.algorithm.make_experience(step))

    def next_step(self, number: int, *, begun: bool = False) -> TrainerStep:
        """What the next step is done with.

        Args:
            number: of the step.
            begun: whether another object has begun it: what devices do counts since then.

        Raises:
            EngineError: the run's directory is gone.
        """
        self.facts.check_directory()
        self.phases.step = number
        if not begun:
            self.devices.begin()
        return TrainerStep(
            StepSettings.of(self.recipe),
            self.facts,
            self.roles,
            self.source,
            self.weights,
            self.phases,
            self.controllers,
            self.contract,
            number,
            version=self.version + 1,
            given_responses=self.given,
            poll=self.checkpoints.poll,
        )

    def learn(self, step: TrainerStep, make_experience: Callable[[], Experience]) -> None:
        """Make an experience and learn from it, and bring the new weights to the engines."""
        with Timer(step.values, metrics.TRAIN_STEP_TIME):
            with termination.abandonable():
                experience = make_experience()
            self.evaluations.begin()
            self.algorithm.learn(step, experience)
            self.count(step)
            digests = self.digests()  # while the actor has its devices
            self.finish_rollout(step.values)
            self.finish_evaluation(step.values)
            self.synchronise(step.values)
            step.record.events.append(self.weights_event(digests))
            self.source.trained(self.version, step.record.pass_rates)
        step.values |= offload_metrics(offloaded_groups(self.recipe, self.roles.models, self.roles.rollout))
        if step.record.tokens:  # none where the responses were given
            rate = step.record.tokens / (step.values[metrics.TRAIN_STEP_TIME] / 1000)
            step.values[metrics.STEP_DEVICE_THROUGHPUT] = rate / self.roles.devices
        step.values |= self.devices.collect() | self.samples.take_figures()
        self.steps_done = step.number
        self.sinks.log(step.number, step.values)
        self.sinks.log_samples(step.number, step.record.texts)
        self.evaluations.log()
        self.samples.keep(step.trained_samples())
        self.events.write(step.number, step.record.events)
        self.show_timeline()

    def show_timeline(self) -> None:
        """Let those who watch the run see what its ranks did, from time to time; training does not depend on it."""
        if time.monotonic() - self.timeline_shown > _TIMELINE_EVERY_S:
            with contextlib.suppress(OSError):
                timeline.write(self.facts.directory / TIMELINE)
            self.timeline_shown = time.monotonic()

    def count(self, step: TrainerStep) -> None:
        """Count the step's updates; an error where nothing is learned any more."""
        self.updates += len(step.updates)
        for batch in step.record.trained:
            self.contract.learned(batch)
        if step.updates:
            applied = any(ranks[0].applied for ranks in step.updates)
            self.steps_without_update = 0 if applied else self.steps_without_update + 1
        if self.steps_without_update == _MOST_STEPS_WITHOUT_UPDATE:
            raise EngineError(
                f"actor: the gradient was not finite in all updates of {_MOST_STEPS_WITHOUT_UPDATE} steps in a row; "
                "nothing is learned"
            )

    def digests(self) -> list[str]:
        """Of the weights of each rank of the actor, for the events; none where no events are written."""
        return self.roles.actor.weights_digest().result() if self.events.wanted else []

    def weights_event(self, digests: list[str]) -> Event:
        """That the engines have taken the weights of these digests."""
        engines = list(range(self.roles.rollout.layout.dp)) if self.roles.rollout is not None else []
        return {"event": "weights", "version": self.version, "engines": engines, "digests": digests}

    def finish_rollout(self, values: dict[str, float]) -> None:
        """Wait for requests in flight, where they have to end before weights change."""
        if self.source.drains:
            self.phases.enter("rollout")
            with Timer(values, metrics.ROLLOUT_WAIT_TIME):
                self.source.drain()

    def finish_evaluation(self, values: dict[str, float]) -> None:
        """Wait for the evaluation beside the step, if there is one: its responses are of the weights of before."""
        if (done := self.evaluations.finish(values)) is not None:
            self.checkpoints.evaluated(done.step, self.evaluations.measurements, done.samples_drawn)

    def synchronise(self, values: dict[str, float]) -> None:
        """Bring the rollout engines, if there are any, to the actor's weights."""
        if self.roles.rollout is None:
            self.version += 1
            return
        self.phases.enter("sync")
        with Timer(values, metrics.SYNC_TIME):
            self.version += 1
            self.source.notice_lost()
            values |= self.weights.sync_weights(self.version, self.source)
