"""One step of a run: the operations that algorithms compose, on the run's roles."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine3d.errors import EngineError
from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.algorithms.base import Applied, Estimated, Experience, Step
from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.kl_control import sequence_kl
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.losses.value import explained_variance
from hybridflow.algorithms.preferences import PAIR
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.config.run import ProfileConfig
from hybridflow.data.prompts import Draw
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.roles.groups import ModelGroup, RolloutGroup
from hybridflow.roles.model import update_metrics
from hybridflow.roles.value import NAMES
from hybridflow.rollout.source import RolloutSource
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.event_log import trained_event
from hybridflow.trainer.operations.model_columns import ModelColumns, old_logprobs
from hybridflow.trainer.operations.scoring import SampleScoring, StepScores
from hybridflow.trainer.operations.settings import StepSettings
from hybridflow.trainer.operations.updates import (
    CRITICS,
    ActorUpdate,
    Corrected,
    ModelUpdates,
    Reports,
    UpdatePlan,
    corrected,
    log_empty,
    refused_updates,
)
from hybridflow.trainer.samples.given_responses import GivenSource
from hybridflow.trainer.samples.store import TrainedSamples
from hybridflow.trainer.startup.role_startup import Roles
from hybridflow.trainer.startup.run_setup import Run
from hybridflow.trainer.step_record import StepRecord
from hybridflow.trainer.weight_sync import NoEngines, WeightSync
from hybridflow.workers.future import Future

_VALUES = {"critic": "values", "cost_critic": "cost_values"}
"""Column of each critic."""


@dataclass
class TrainerStep(Step[Any]):
    """Operations of one step, on the roles of a run.

    Args:
        settings: of the operations.
        run: with the prompts of training, and the directory for traces.
        roles: of the run.
        source: of the samples.
        scoring: of the samples.
        weights: of the engines, which may share the actor's memory.
        phases: file of the run's current phase.
        controllers: of the algorithm's coefficients.
        contract: refuses samples that must not be trained on.
        number: of the step, from 1.
        version: of the weights that the step makes.
        given_responses: responses that the data have, in a run without engines.
        poll: looks after the checkpoint that is being written; called between two phases.
        record: results of the step.
    """

    settings: StepSettings
    run: Run
    roles: Roles
    source: RolloutSource
    scoring: SampleScoring
    weights: WeightSync | NoEngines
    phases: PhaseFile
    controllers: Controllers
    contract: Contract
    number: int
    version: int
    given_responses: GivenSource | None = None
    poll: Callable[[], None] = lambda: None
    record: StepRecord = field(default_factory=StepRecord)
    reports: dict[str, Reports] = field(default_factory=dict)
    """Reports of the ranks of each role on all optimizer steps, of as many experiences as the step trains on."""

    def __post_init__(self) -> None:
        self.values, roles, settings = self.record.values, self.roles, self.settings
        self._traces = StepTraces(settings.trainer.profile_of(self.number), self.run, self.number)
        temperature = settings.rollout.sampling.temperature
        critics = {role: roles.scalar[role] for role in CRITICS if role in roles.scalar}
        values = {_VALUES[role]: group for role, group in critics.items()}
        self._columns = ModelColumns(
            roles.actor,
            self._reference,
            roles.teacher,
            values,
            temperature,
            self.version - 1,
            settings.records_routes,
            partial(self.phases.enter, "infer"),
        )
        self._models = ModelUpdates(roles.actor, critics)
        self._scores = StepScores(self.scoring, self.source, self.run, self.record, self.phases, self.number, settings)

    @property
    def _reference(self) -> Callable[..., Future[Columns]] | None:
        """The call that computes log-probs of the reference; None without one."""
        if self.roles.reference is not None:
            return self.roles.reference.logprobs
        return (
            self.roles.actor.base_logprobs if self.settings.reference_is_base and self.config.needs_reference else None
        )

    @property
    def config(self) -> Any:
        return self.controllers.config(self.number)

    @property
    def multiplier(self) -> LagrangeMultiplier:
        assert self.controllers.multiplier is not None
        return self.controllers.multiplier

    @property
    def replay(self) -> ReplayBuffer:
        assert self.controllers.replay is not None
        return self.controllers.replay

    @property
    def prompts_per_step(self) -> int:
        return self.settings.trainer.prompts_per_step

    @property
    def least_prompts(self) -> int:
        rollout = self.roles.rollout
        engines = rollout.layout.dp if rollout is not None else 1
        return max(engines, -(-self.scoring.ranks // self.settings.rollout.samples_per_prompt))

    def response_limits(self, batch: RemoteBatch) -> Tensor:
        table = self.settings.rollout.sampling_table
        prompts = batch.lengths - batch.per_sample["response_lengths"]
        limits = [table.for_prompt(tokens).max_new_tokens for tokens in prompts.tolist()]
        return torch.tensor(limits, dtype=torch.int64)

    def generator(self, name: str) -> torch.Generator:
        text = f"{self.settings.seed}:{self.number}:{name}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        return torch.Generator().manual_seed(seed)

    # Responses

    def draw(self, count: int | None = None) -> Draw:
        if self.roles.rollout is not None:
            self.phases.enter("rollout")
        draw = self.source.draw(count)
        self.record.events += self.source.take_events()
        return draw

    def given(self, draw: Draw) -> RemoteBatch:
        assert self.given_responses is not None
        batch = self.given_responses.batch(draw, self.source.reserve_samples(PAIR * len(draw.indices)))
        self.record.tokens += int(batch.lengths.sum())
        self._scores.add_texts(batch, batch.per_sample["rewards"])
        return batch

    def generate(self, draw: Draw) -> RemoteBatch:
        """Responses of the current policy, `rollout.samples_per_prompt` to each prompt.

        With `trainer.max_staleness` those of the policy before it, and the engines continue with the next step's.
        """
        self.phases.enter("rollout")
        if not self.record.rollouts:
            self._traces.trace_rollout(self.roles.rollout)
        rollout, serving = self.source.rollout(draw, self.number), self.version - 1
        self.record.add_rollout(rollout, serving)
        self.values |= self.source.take_metrics()
        # A resumed run may hold a rollout that was made ahead, and make no more of them.
        older = bool((rollout.batch.per_sample["policy_versions"] < serving).any())
        self.record.stale |= self.contract.allows_older or older
        self.poll()  # files were written while the engines generated
        return rollout.batch

    def recall(self, samples: SampleBatch) -> RemoteBatch:
        self.record.stale = True
        self.record.recalled.update(samples.sample_ids.tolist())
        return RemoteBatch.of(samples)

    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        self.phases.enter("rollout")
        sampling = self.settings.rollout.sampling_table.greedy()
        with Timer(self.values, metrics.BASELINE_TIME):
            return self.source.sample(draw, sampling, 1).batch()

    # Other models

    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        return self._columns.logprobs(batch, old=self._recomputes)

    @property
    def _recomputes(self) -> bool:
        """True if the trainer computes the log-probs of its own policy before the first update."""
        if (correction := self.config.correction) is not None:
            return bool(correction.needs_proximal)
        # With one update they are those of the update itself; given responses have no ratio to any policy.
        several = self.settings.trainer.updates_per_step > 1
        return several and not self.record.stale and bool(self.config.needs_engines)

    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int = 0, of_student: bool = False) -> RemoteBatch:
        return self._columns.teacher_logprobs(batch, top_k=top_k, of_student=of_student)

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        return self._columns.values(batch)

    def estimate(
        self, batch: RemoteBatch, function: Callable[..., Columns], role: str, **arguments: float
    ) -> tuple[RemoteBatch, Moments]:
        self.wait_for_columns()
        group = self.roles.learning[role]
        future = group.apply(batch, function=function, arguments={"config": self.config, **arguments})
        notes: list[Estimated] = future.notes()
        for critic in notes[0].critics:
            name = NAMES[critic].explained_variance
            self.values[name] = explained_variance(note.critics[critic] for note in notes)
        return batch.with_columns(future), Moments.merge(note.advantages for note in notes)

    def apply(self, batch: RemoteBatch, function: Callable[..., Columns], **arguments: Any) -> Applied:
        self.wait_for_columns()
        return self.roles.actor.apply(batch, function=function, arguments={"config": self.config, **arguments})

    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        if self._recomputes and not self._models.begun:  # those of these weights are there already
            return batch.with_columns(current_logprobs=self.apply(batch, old_logprobs))
        return self._columns.current_logprobs(batch)

    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        config = self.config
        if not (config.needs_reference and config.kl_in == "reward"):
            return 0.0
        penalty: Tensor = config.kl_coef * self.apply(batch, sequence_kl).per_sample()["kl"]
        return penalty

    def log(self, stats: Mapping[str, Tensor]) -> None:
        self.record.add_means(stats)

    def wait_for_columns(self) -> None:
        """Wait for the columns in flight: from here on the driver does nothing else."""
        self.values |= self._columns.wait()

    # Rewards and costs

    def rewards(self, batch: RemoteBatch, *, baseline: bool = False, partial: bool = False) -> RemoteBatch:
        return self._scored(batch, "reward", "rewards", baseline=baseline, partial=partial)

    def costs(self, batch: RemoteBatch) -> RemoteBatch:
        return self._scored(batch, "cost", "costs")

    def _scored(
        self, batch: RemoteBatch, what: str, column: str, *, baseline: bool = False, partial: bool = False
    ) -> RemoteBatch:
        total, rows = self._scores.add(what, batch, baseline=baseline, partial=partial)
        if not baseline and not partial and len(rows) < (least := self.least_samples):
            raise EngineError(
                f"step {self.number}: {len(rows)} of {len(batch)} samples have a {what}, expected at least {least}, "
                "one for each data-parallel rank and mini-batch"
            )
        return batch.with_per_sample(**{column: total}).select(rows)

    def trained_samples(self) -> TrainedSamples:
        """The samples that the step has trained on, for the run's sample store."""
        prompts = self.run.train if self.settings.stores_samples else None
        return self.record.trained_samples(self.number, self.version, prompts)

    @property
    def least_samples(self) -> int:
        """The fewest of which every data-parallel rank of every role has one in each mini-batch."""
        roles = self.roles
        replicas = max(group.layout.dp for group in (roles.actor, *roles.models.values()))
        return self.settings.trainer.mini_batches * replicas

    # Training

    @property
    def updates(self) -> Reports:
        """Reports of the actor's ranks on each optimizer step."""
        return self.reports.get("actor", [])

    def update(self, experience: Experience, *, value_clip: float | None = None, critics_only: bool = False) -> None:
        self.wait_for_columns()
        record, batch, config = self.record, experience.batch, self.config
        self._check(batch)
        record.trained.append(batch)
        record.baselines |= experience.baselines
        self.phases.enter("update")
        self.weights.before_update(self.version)
        samples = Corrected(batch) if critics_only else corrected(self, batch, record.corrections)
        limit = self.settings.rollout.sampling_table.longest_response
        plan = UpdatePlan.of(samples, config, self.settings.trainer, limit, critics_only=critics_only)
        self._traces.trace_updates(self.roles.learning, self._models.trained(plan))
        prepare = load(config.name).prepare
        of_actor = ActorUpdate(
            config,
            self.settings.rollout.sampling.temperature,
            self.version - 1,
            experience.whiten,
            record.stale,
            partial(prepare, self) if prepare is not None else None,
        )
        with Timer(self.values, metrics.TRAIN_UPDATE_TIME):
            reports = self._models.run(plan, of_actor, value_clip)
        for name, refused in refused_updates(reports["actor"], config.kl_guard, self.number).items():
            self.values[name] = self.values.get(name, 0) + refused
        by_number = dict(zip(plan.actor, reports["actor"], strict=True))
        record.events.append(trained_event(batch, record.recalled, plan.split, by_number))
        if not critics_only:
            count = len(plan.mini_batches)
            log_empty(self, count - len(plan.actor), count)
        for role, updates in reports.items():
            of_role = self.reports.setdefault(role, [])
            of_role += updates
            names = NAMES[CRITICS[role]] if role in CRITICS else metrics.ACTOR
            self.values |= update_metrics(of_role, names) if of_role else {}
        record.add_expert_loads(self.reports)
        self.values |= self.controllers.metrics(self.number)
        self.controllers.learn(self.values, len(batch))

    def _check(self, batch: RemoteBatch) -> None:
        """Refuse a batch that is too small for all ranks, or has samples that must not be trained on."""
        self._scores.check_joined()
        if len(batch) < (least := self.least_samples):
            raise EngineError(
                f"step {self.number}: {len(batch)} samples are left to train on, expected at least {least}"
            )
        if self.config.needs_engines:
            recalled = frozenset(self.record.recalled)
            self.contract.check(batch, step=self.number, serving=self.version - 1, recalled=recalled)


class StepTraces:
    """Requests for the traces of one step.

    Args:
        settings: of the step's traces; None where it is not traced.
        run: with the directory for traces.
        number: of the step.
    """

    def __init__(self, settings: ProfileConfig | None, run: Run, number: int) -> None:
        self._settings, self._run, self._number = settings, run, number

    def trace_rollout(self, rollout: RolloutGroup | None) -> None:
        """Trace the next steps of the first engine."""
        if self._settings is None or not self._settings.rollout_steps or rollout is None:
            return
        directory = self._run.rollout_trace_directory(self._number)
        for why in filter(None, rollout.trace(directory, steps=self._settings.rollout_steps).result()):
            log.warning(f"step {self._number}: no trace of the rollout: {why}")

    def trace_updates(self, models: Mapping[str, ModelGroup], roles: Sequence[str]) -> None:
        """Trace the next update of these roles. `models`: by role."""
        if self._settings is not None:
            for role in roles:
                path = self._run.trace_path(self._number, role)
                models[role].trace_next_update(path, micro_batches=self._settings.micro_batches).result()
