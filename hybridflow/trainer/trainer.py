"""The loop: steps of the algorithm, each with its transfer of weights, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import NoReturn

from engine3d.errors import EngineError
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.checkpoint.driver_state import Measurements, RandomState, RunState
from hybridflow.checkpoint.manager import Checkpoints
from hybridflow.checkpoint.resume import Resumption
from hybridflow.cluster.devices.device_monitor import DeviceMonitor
from hybridflow.cluster.processes.termination import Abandoned, termination
from hybridflow.config.reading.yaml_loader import public_settings
from hybridflow.config.recipe import Recipe
from hybridflow.config.run import TrainerConfig
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.metrics.precisions import compared_precisions
from hybridflow.metrics.timeline import timeline
from hybridflow.planning.data.prompts import prompt_order
from hybridflow.roles.groups import offload_metrics, offloaded_groups
from hybridflow.rollout.rollouts import RolloutSnapshot
from hybridflow.rundir.file_names import EVALUATIONS, EXPORT, TIMELINE
from hybridflow.rundir.samples.evaluation_texts import forget_after
from hybridflow.rundir.status.lock import move_aside
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.evaluation.evaluations import Evaluations
from hybridflow.trainer.evaluation.of_set import SetMeasurer, set_identities
from hybridflow.trainer.event_log import Event, EventLog
from hybridflow.trainer.operations.scoring import SampleScoring
from hybridflow.trainer.operations.settings import StepSettings
from hybridflow.trainer.resume import resumed_draws
from hybridflow.trainer.samples.given_responses import GivenSource, PairMeasurer
from hybridflow.trainer.samples.store import SampleStore
from hybridflow.trainer.startup.role_startup import Roles, wait_for
from hybridflow.trainer.startup.rollout_source import rollout_source
from hybridflow.trainer.startup.run_setup import Run
from hybridflow.trainer.startup.sft_warmup import warm_up
from hybridflow.trainer.step import TrainerStep
from hybridflow.trainer.weight_sync import NoEngines, WeightSync

_MOST_STEPS_WITHOUT_UPDATE = 3
_TIMELINE_EVERY_S = 30.0
_ACRONYM = 5
"""Letters of an algorithm's name that is written in capitals."""


def _steps_sentence(algorithm: AlgorithmSettings, trainer: TrainerConfig, samples: int, steps_done: int) -> str:
    """Describe the steps of a run in one sentence, such as "GRPO: 120 steps of 64 prompts x 8 samples".

    Args:
        algorithm, trainer: settings of the run.
        samples: of each prompt.
        steps_done: after which it resumes; 0 of a fresh start.
    """
    name = algorithm.name.upper() if len(algorithm.name) <= _ACRONYM else algorithm.name.rpartition("/")[2]
    steps = f"{trainer.steps:,} steps of"
    if steps_done:
        steps = f"steps {steps_done + 1:,} to {trainer.steps:,}, each of"
    if not algorithm.needs_engines:
        return f"{name}: {steps} {trainer.prompts_per_step:,} examples"
    return f"{name}: {steps} {trainer.prompts_per_step:,} prompts x {samples:,} samples"


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
        self.recipe, self.setup, self.roles, self.weights, self.phases = recipe, run, roles, weights, phases
        self.sinks, self.checkpoints, self.devices, self.samples = sinks, checkpoints, devices, samples
        self.events = events
        per_step = recipe.trainer.prompts_per_step
        self.order = prompt_order(recipe.data, recipe.order_seed, per_step, run.train)
        self.source = rollout_source(recipe, run, roles, weights, self.order)
        self.controllers = Controllers(recipe.algorithm)
        self.contract = Contract.of(recipe.trainer)
        self.step_settings = StepSettings.of(recipe)
        self.scoring = SampleScoring.of(roles, recipe.functions, recipe.scoring, run.train)
        self.given: GivenSource | None = None
        if not recipe.algorithm.needs_engines:
            held_out, temperature = run.sets.get(metrics.EVAL), recipe.rollout.sampling.temperature
            self.given = GivenSource(recipe.algorithm, temperature, per_step, run.train, held_out, roles.actor)
        releases = recipe.rollout.engine.release_weights
        self.offloaded = offloaded_groups(roles.models, recipe.offloaded_roles, roles.rollout, release_weights=releases)
        self.algorithm = load(recipe.algorithm.name)
        self.steps_done = 0
        self.version = 0
        self.updates = 0
        self.steps_without_update = 0
        self.timeline_shown = -math.inf
        identities = set_identities(
            recipe.sets,
            run.sets,
            algorithm=recipe.algorithm.name,
            judge=recipe.judge,
            reward_model=recipe.reward_model,
        )
        measurer = SetMeasurer.of_run(run, roles, self.source, identities, recipe.metrics.sample_characters)
        pairs = PairMeasurer(self.given, self.controllers) if self.given is not None else None
        self.evaluations = Evaluations(
            recipe.sets, recipe.trainer, recipe.limits, phases, sinks, measurer, pairs, evaluating
        )

    def run(self) -> Measurements:
        """Warm up and train, or resume. Returns the measurements of the run's evaluations."""
        settings = self.recipe.trainer
        if self.start():
            self.evaluate(0)
            self.save(0)
        elif self.setup.evaluation_due:
            self.evaluate_resumed()
        if self.steps_done < settings.steps:
            samples = self.recipe.rollout.samples_per_prompt
            sentence = _steps_sentence(self.recipe.algorithm, settings, samples, self.steps_done)
            if self.recipe.train.precision is not None or self.recipe.rollout.engine.altered_policy:
                compared = compared_precisions(dict(self.recipe.train), dict(self.recipe.rollout.engine))
                sentence += f"; mismatch of {compared}"
            self.sinks.begin("train", sentence)
        with termination.saves(self.recipe.checkpoint.on_stop_s):
            for number in range(self.steps_done + 1, settings.steps + 1):
                self.step_or_end(number)
                self.evaluate(number)
                self.save(number)
                if termination.stop_requested:
                    self.end_saved(self.state())
            self.phases.enter("save")
            self.checkpoints.wait()
        if settings.export:
            self.roles.actor.export(self.setup.directory / EXPORT).result()
        return self.evaluations.measurements

    def evaluate(self, step: int) -> None:
        """Evaluate the policy of after a step on each held-out set for which it is time; 0 is before the first."""
        self.evaluations.evaluate(step, self.version)

    def evaluate_resumed(self) -> None:
        """Run the evaluation that was due when the checkpoint was saved; in the background of the next step again."""
        self.evaluate(self.steps_done)
        if self.evaluations.pending is None:
            drawn = self.source.reserve_samples(0)
            self.checkpoints.evaluated(self.steps_done, self.evaluations.measurements, drawn)

    def start(self) -> bool:
        """All that comes before the next step: the roles are there, and the engines serve the actor's weights.

        Returns:
            True if the run begins, false if it resumes.
        """
        resumption = self.setup.resumption
        self.phases.enter("start" if resumption is None else "load")
        wait_for(self.roles, "actor")
        versions: dict[str, str] = self.roles.starting["actor"].result()[0]
        log.info("  ".join(f"{name} {version}" for name, version in versions.items()))
        if resumption is not None and resumption.state is not None:
            self.resume(resumption, resumption.state)
            return False
        self.begin()
        return True

    def begin(self) -> None:
        """Warm up, and bring the engines to the weights that the first step begins with."""
        RandomState.seed(self.recipe.seed)
        if self.recipe.warmup is not None:
            warm_up(self.recipe, self.setup, self.roles, self.phases, self.sinks)
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
        if (self.setup.directory / EXPORT).exists():
            move_aside(self.setup.directory / EXPORT)  # that of the same run, when it was to end sooner
        wait_for(self.roles, *self.roles.starting)
        draws = resumed_draws(public_settings(self.recipe), self.order.sampler(), self.source, resumption, state)
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
        self.checkpoints.resume(state.best)
        forget_after(self.setup.directory / EVALUATIONS, state.step)
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
            run=self.setup.identity,
            inputs=self.setup.inputs,
            groups=rollouts.groups,
            replay=replay.samples if replay is not None else None,
            kept=self.given.state_dict() if self.given is not None else {},
        )

    def save(self, step: int) -> None:
        """Complete the save in flight if it is written, and begin one if it is due or a signal has requested it."""
        self.checkpoints.poll()
        if self.checkpoints.due(step) or self.asked_to_save():
            self.phases.enter("save")
            self.checkpoints.save(self.roles.learning, self.state())

    def asked_to_save(self) -> bool:
        """True if SIGUSR1 has come, in a run that saves checkpoints."""
        if not termination.take_save_request():
            return False
        if self.recipe.checkpoint.save_interval is None:
            log.warning("SIGUSR1: this run saves no checkpoints (checkpoint.save_interval=null)")
            return False
        return True

    def step_or_end(self, number: int) -> None:
        """One step; the run ends if a signal requests it before the models have begun to train on it."""
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
        complete = self.checkpoints.has(state.step)
        termination.end_asked(f"the checkpoint of step {state.step} is whole" if complete else None)

    def step(self, number: int) -> None:
        """One step of the algorithm, and the new weights to the engines."""
        step = self.next_step(number)
        self.learn(step, lambda: self.algorithm.make_experience(step))

    def next_step(self, number: int, *, begun: bool = False) -> TrainerStep:
        """Build the next step's operations.

        Args:
            number: of the step.
            begun: whether another object has begun it: what devices do counts since then.

        Raises:
            EngineError: the run's directory is gone.
        """
        self.setup.check_directory()
        self.phases.step = number
        if not begun:
            self.devices.begin()
        return TrainerStep(
            self.step_settings,
            self.setup,
            self.roles,
            self.source,
            self.scoring,
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
        """Make an experience and train on it, and bring the new weights to the engines."""
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
        step.values |= offload_metrics(self.offloaded)
        if step.record.tokens:  # none where the responses were given
            rate = step.record.tokens / (step.values[metrics.TRAIN_STEP_TIME] / 1000)
            step.values[metrics.STEP_DEVICE_THROUGHPUT] = rate / self.roles.devices
        step.values |= self.devices.collect() | self.samples.take_metrics()
        self.steps_done = step.number
        self.sinks.log(step.number, step.values)
        self.sinks.log_samples(step.number, step.record.texts)
        self.sinks.log_expert_loads(step.number, step.record.expert_loads)
        self.evaluations.log()
        self.samples.keep(step.trained_samples())
        self.events.write(step.number, step.record.events)
        self.show_timeline()

    def show_timeline(self) -> None:
        """Write the timeline from time to time for those who watch the run; training does not depend on it."""
        if time.monotonic() - self.timeline_shown > _TIMELINE_EVERY_S:
            with contextlib.suppress(OSError):
                timeline.write(self.setup.directory / TIMELINE)
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
        """Digests of the weights of each rank of the actor, for the events; none if no events are written."""
        return self.roles.actor.weights_digest().result() if self.events.enabled else []

    def weights_event(self, digests: list[str]) -> Event:
        """The event that the engines have the weights of these digests."""
        engines = list(range(self.roles.rollout.layout.dp)) if self.roles.rollout is not None else []
        return {"event": "weights", "version": self.version, "engines": engines, "digests": digests}

    def finish_rollout(self, values: dict[str, float]) -> None:
        """Wait for requests in flight, where they have to end before weights change."""
        if self.source.drains:
            self.phases.enter("rollout")
            with Timer(values, metrics.ROLLOUT_WAIT_TIME):
                self.source.drain()

    def finish_evaluation(self, values: dict[str, float]) -> None:
        """Wait for the evaluation in the background, if there is one: its responses are of the previous weights."""
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
