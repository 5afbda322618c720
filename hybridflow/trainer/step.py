"""One step of a run: the operations that algorithms compose, on the run's roles."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine3d.errors import EngineError
from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.algorithms.base import Applied, Estimated, Experience, Step, ValueKind
from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.kl_control import sequence_kl
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.losses.value import explained_variance
from hybridflow.algorithms.preferences import PAIR
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import COUNTED, Columns
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import RolloutRole, ScoringModel
from hybridflow.config.run import TrainerConfig
from hybridflow.data.prompts import Draw
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.result import RewardResult, check_given
from hybridflow.roles.model import Update, update_metrics
from hybridflow.roles.reward import reward_result
from hybridflow.roles.value import NAMES
from hybridflow.rollout.source import RolloutSource
from hybridflow.rundir.progress import PhaseFile
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.correcting import Corrected, corrected, tell_empty
from hybridflow.trainer.event_log import learned_event
from hybridflow.trainer.given_responses import GivenSource
from hybridflow.trainer.role_startup import Roles, judging
from hybridflow.trainer.run_setup import Run
from hybridflow.trainer.sample_store import TrainedSamples
from hybridflow.trainer.sample_texts import sample_texts
from hybridflow.trainer.step_record import Scores, StepRecord
from hybridflow.trainer.weight_sync import NoEngines, WeightSync
from hybridflow.workers.future import Future

_SCORING = ("reward_model", "cost_model")
_CRITICS: dict[str, ValueKind] = {"critic": "reward", "cost_critic": "cost"}


@dataclass(frozen=True)
class StepSettings:
    """Settings of the operations of a step.

    Args:
        seed: of the run.
        trainer: sizes of a step, its mini-batches and what is traced.
        rollout: sampling and samples per prompt.
        functions: reward functions of each kind of score, "reward" or "cost".
        scoring: scoring model of each kind.
        passing: least reward of a response that passes, for a curriculum by difficulty; None without one.
        texts: samples of a step that are written as texts, and most characters of each.
        stores_samples: True if a step's samples are stored.
    """

    seed: int
    trainer: TrainerConfig
    rollout: RolloutRole
    functions: Mapping[str, RewardConfig]
    scoring: Mapping[str, ScoringModel]
    passing: float | None
    texts: tuple[int, int]
    stores_samples: bool

    @classmethod
    def of(cls, recipe: Recipe) -> StepSettings:
        """The settings that a recipe has."""
        files, shown = recipe.data.files, recipe.metrics
        return cls(
            recipe.seed,
            recipe.trainer,
            recipe.rollout,
            recipe.functions,
            recipe.scoring,
            files.difficulty.passing if files is not None and files.difficulty is not None else None,
            (shown.samples_per_step, shown.sample_characters),
            recipe.samples.store,
        )


@dataclass
class TrainerStep(Step[Any]):
    """Operations of one step, on the roles of a run.

    Args:
        settings: of the operations.
        run: with the prompts of training, and the directory for traces.
        roles: of the run.
        source: of the samples.
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
    weights: WeightSync | NoEngines
    phases: PhaseFile
    controllers: Controllers
    contract: Contract
    number: int
    version: int
    given_responses: GivenSource | None = None
    poll: Callable[[], None] = lambda: None
    record: StepRecord = field(default_factory=StepRecord)
    updates: list[list[Update]] = field(default_factory=list)
    """Reports of the actor's ranks on each optimizer step."""
    updates_begun: int = 0
    """Optimizer steps of the actor."""
    _in_flight: list[Future[Any]] = field(default_factory=list)
    _teaching: Future[Columns] | None = None
    _began: float = math.nan

    def __post_init__(self) -> None:
        self.values = self.record.values

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
        roles = self.roles
        scoring = [*roles.functions.values(), *(group for role, group in roles.scalar.items() if role in _SCORING)]
        ranks = max((group.layout.dp for group in scoring), default=1)
        engines = roles.rollout.layout.dp if roles.rollout is not None else 1
        return max(engines, -(-ranks // self.settings.rollout.samples_per_prompt))

    def response_limits(self, batch: RemoteBatch) -> Tensor:
        table = self.settings.rollout.sampling_table
        prompts = batch.lengths - batch.facts["response_lengths"]
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
        self._add_texts(batch, batch.facts["rewards"])
        return batch

    def generate(self, draw: Draw) -> RemoteBatch:
        """Responses of the current policy, `rollout.samples_per_prompt` to each prompt.

        With `trainer.max_staleness` those of the policy before it, and the engines continue with the next step's.
        """
        self.phases.enter("rollout")
        if not self.record.rollouts:
            self._trace_rollout()
        rollout, serving = self.source.rollout(draw, self.number), self.version - 1
        self.record.add_rollout(rollout, serving)
        self.values |= self.source.take_metrics()
        # A resumed run may hold a rollout that was made ahead, and make no more of them.
        older = bool((rollout.batch.facts["policy_versions"] < serving).any())
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
        roles, temperature = self.roles, self.settings.rollout.sampling.temperature
        columns, generated = {}, batch.as_generated()
        if roles.reference is not None:
            columns["ref_logprobs"] = roles.reference.logprobs(generated, temperature=temperature)
        if self._recomputes:
            columns["old_logprobs"] = roles.actor.logprobs(generated, temperature=temperature)
        return self._with_columns(batch, columns)

    @property
    def _recomputes(self) -> bool:
        """Whether the trainer finds the log-probs of its own policy before the first update."""
        if (correction := self.config.correction) is not None:
            return bool(correction.needs_proximal)
        # With one update they are those of the update itself; given responses have no ratio to any policy.
        several = self.settings.trainer.updates_per_step > 1
        return several and not self.record.stale and bool(self.config.needs_engines)

    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int = 0, of_student: bool = False) -> RemoteBatch:
        roles, asked = self.roles, batch.as_generated()
        assert roles.teacher is not None
        if top_k and of_student:
            best = roles.actor.top_tokens(asked, count=top_k)
            batch, asked = self._with_columns(batch, {}, best), asked.with_columns(best)
        temperature = self.settings.rollout.sampling.temperature
        self._teaching = roles.teacher.teacher_logprobs(asked, temperature=temperature, top_k=top_k)
        return self._with_columns(batch, {}, self._teaching)

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        models, columns = self.roles.scalar, {"critic": "values", "cost_critic": "cost_values"}
        generated = batch.as_generated()
        return self._with_columns(
            batch, {column: models[role].values(generated) for role, column in columns.items() if role in models}
        )

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
        if self._recomputes and not self.updates_begun:  # found already: of these weights
            return batch.with_columns(current_logprobs=self.apply(batch, old_logprobs))
        temperature = self.settings.rollout.sampling.temperature
        columns = self.roles.actor.logprobs(batch.as_generated(), temperature=temperature)
        return batch.with_columns(current_logprobs=columns)

    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        config = self.config
        if not (config.needs_reference and config.kl_in == "reward"):
            return 0.0
        penalty: Tensor = config.kl_coef * self.apply(batch, sequence_kl).facts()["kl"]
        return penalty

    def tell(self, figures: Mapping[str, Tensor]) -> None:
        self.record.add_means(figures)

    def _with_columns(
        self, batch: RemoteBatch, columns: Mapping[str, Future[Columns]], *unnamed: Future[Columns]
    ) -> RemoteBatch:
        if (columns or unnamed) and not self._in_flight:
            self._began = time.perf_counter()
        self._in_flight += [*columns.values(), *unnamed]
        return batch.with_columns(*unnamed, **columns)

    def wait_for_columns(self) -> None:
        """Until the columns are there that were asked for; from here on the driver does nothing else."""
        if self._in_flight:
            self.phases.enter("infer")
            for future in self._in_flight:
                future.wait()
            self._in_flight.clear()
            self.values[metrics.INFERENCE_TIME] = 1000 * (time.perf_counter() - self._began)
        if self._teaching is not None:
            self.values[metrics.DISTILLATION_TEACHER_TIME] = 1000 * max(self._teaching.notes())
            self._teaching = None

    # Rewards and costs

    def rewards(self, batch: RemoteBatch, *, baseline: bool = False, part: bool = False) -> RemoteBatch:
        return self._scored(batch, "reward", "rewards", baseline=baseline, part=part)

    def costs(self, batch: RemoteBatch) -> RemoteBatch:
        return self._scored(batch, "cost", "costs")

    def _scored(
        self, batch: RemoteBatch, what: str, fact: str, *, baseline: bool = False, part: bool = False
    ) -> RemoteBatch:
        self.phases.enter("reward")
        latency, times = f"{what}/latency_ms", dict[str, float]()
        result, score = None, None
        with Timer(times, latency):
            model, generated = self.settings.scoring.get(what), batch.as_generated()
            scoring = self.roles.scalar[f"{what}_model"].score(generated) if model is not None else None
            total, kept = torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool)
            if what in self.roles.functions:
                result = self._score_by_functions(what, generated, part=part)
                total, kept = result.total, ~result.dropped
            if model is not None and scoring is not None:
                score = scoring.facts()["score"]
                total = total + model.weight * score
        rows = kept.nonzero()[:, 0]
        if not baseline:
            rewards = what == "reward"
            if rewards and not self.record.scores.get(what):
                self._add_texts(generated.select(rows), total[rows])
            self.record.add_scores(what, Scores(batch.facts["sample_ids"], total, kept, result, score))
            self.values[latency] = self.values.get(latency, 0.0) + times[latency]
            if rewards:
                prompts = batch.facts["prompt_indices"][rows]
                self.record.add_rewards(prompts, total[rows], self.run.train, self.settings.passing)
            if not part:
                self._check_enough(len(rows), len(batch), what)
        return batch.with_facts(**{fact: total}).select(rows)

    def _score_by_functions(self, what: str, batch: RemoteBatch, *, part: bool) -> RewardResult:
        """Scores of the functions: those that samples have already, or new ones.

        Args:
            what: "reward" or "cost".
            batch: as it was generated: the call waits for no column that a model still computes.
            part: True for some of the step's samples.
        """
        functions = self.roles.functions[what]
        result = self.source.rewards(what, batch.facts["sample_ids"].tolist())
        with judging(self.roles.judge) as judged:
            if result is None:
                examples = self.run.train.at(batch.facts["prompt_indices"].tolist())
                result = reward_result(functions.score(batch, examples=examples, what=what))
        if part:
            self.record.in_parts.add(what)
        else:
            check_given(result, self.settings.functions[what].functions)
        self.values |= judged
        tell_failures(f"step {self.number}, {self.phases.phase}", result)
        return result

    def _add_texts(self, batch: RemoteBatch, rewards: Tensor) -> None:
        """Add some samples as texts. `rewards`: (B,)."""
        count, characters = self.settings.texts
        examples, tokenizer = self.run.train.examples, self.run.tokenizer
        self.record.texts += sample_texts(batch, rewards, examples, tokenizer, count=count, characters=characters)

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

    def _check_enough(self, kept: int, count: int, what: str) -> None:
        if kept < (least := self.least_samples):
            raise EngineError(
                f"step {self.number}: {kept} of {count} samples have a {what}, expected at least {least}, one for each "
                "data-parallel rank and mini-batch"
            )

    # Training

    def update(self, experience: Experience, *, value_clip: float | None = None, critics_only: bool = False) -> None:
        self.wait_for_columns()
        record, batch, config = self.record, experience.batch, self.config
        self._check(batch)
        record.trained.append(batch)
        record.baselines |= experience.baselines
        self.phases.enter("update")
        models, trainer = self.roles.scalar, self.settings.trainer
        critics = {role: kind for role, kind in _CRITICS.items() if role in models}
        self.weights.before_update(self.version)
        of_actor = Corrected(batch) if critics_only else corrected(self, batch)
        limit = self.settings.rollout.sampling_table.longest_response
        parts = _mini_batches(of_actor.batch, trainer.mini_batches, load(config.name).together)
        mini_batches = [_weighted(each, config, limit) for each in parts]
        mini_batches *= trainer.epochs
        made = {n: each for n, each in enumerate(mini_batches) if not critics_only and of_actor.has_weight(each)}
        self._trace_updates([*critics, *(["actor"] if made else [])])
        calls: dict[str, list[Future[list[Update]]]] = {role: [] for role in (*critics, "actor")}
        with Timer(self.values, metrics.TRAIN_UPDATE_TIME):
            # One model after another: where they share devices, each has one turn.
            for role, kind in critics.items():
                calls[role] = [models[role].update_values(each, clip=value_clip, kind=kind) for each in mini_batches]
            calls["actor"] = [self._update_actor(each, config, experience.whiten) for each in made.values()]
            results = {role: [future.result() for future in futures] for role, futures in calls.items()}
        self.updates = results.pop("actor")
        self._tell_refused()
        record.events.append(learned_event(batch, record.recalled, parts, dict(zip(made, self.updates, strict=True))))
        if not critics_only:
            tell_empty(self, len(mini_batches) - len(made), len(mini_batches))
        self.values |= update_metrics(self.updates) if self.updates else {}
        for role, updates in results.items():
            self.values |= update_metrics(updates, NAMES[critics[role]])
        self.values |= self.controllers.figures(self.number)
        self.controllers.learn(self.values, len(batch))

    def _check(self, batch: RemoteBatch) -> None:
        """Refuse a batch that is too small for all ranks, or has samples that must not be trained on."""
        record = self.record
        for what in record.in_parts:  # of each of which alone a function may fail on all samples
            if (scores := record.scores.get(what)) and (result := Scores.join(scores).result) is not None:
                check_given(result, self.settings.functions[what].functions)
        if len(batch) < (least := self.least_samples):
            raise EngineError(
                f"step {self.number}: {len(batch)} samples are left to learn from, expected at least {least}"
            )
        if self.config.needs_engines:
            recalled = frozenset(record.recalled)
            self.contract.check(batch, step=self.number, serving=self.version - 1, recalled=recalled)

    def _update_actor(
        self, batch: RemoteBatch, config: AlgorithmSettings, whiten: Moments | None
    ) -> Future[list[Update]]:
        temperature, prepare = self.settings.rollout.sampling.temperature, load(config.name).prepare
        correction = config.correction
        batch = batch if prepare is None else prepare(self, batch)
        self.updates_begun += 1
        return self.roles.actor.update(
            batch,
            algorithm=config,
            temperature=temperature,
            whitening=whiten,
            stale=self.record.stale,
            against_rollout=self.record.stale if correction is None else correction.against == "rollout",
        )

    def _tell_refused(self) -> None:
        """One line where the KL guard refused updates."""
        if self.config.kl_guard is None or not self.updates:
            return
        refused = sum(ranks[0].refused for ranks in self.updates)
        self.values[metrics.TRAIN_REFUSED_UPDATES] = refused
        if refused:
            line = (
                f"step {self.number}: {refused} of {len(self.updates)} updates would have begun past "
                f"algorithm.kl_guard={self.config.kl_guard:g} and were skipped; the learning rate starts anew"
            )
            log.warning(line)

    # Traces, where `trainer.profile` asks for them

    def _trace_rollout(self) -> None:
        """Trace the next steps of the first engine."""
        settings, rollout = self.settings.trainer.profile_of(self.number), self.roles.rollout
        if settings is None or not settings.rollout_steps or rollout is None:
            return
        directory = self.run.rollout_trace_directory(self.number)
        for why in filter(None, rollout.trace(directory, steps=settings.rollout_steps).result()):
            log.warning(f"step {self.number}: no trace of the rollout: {why}")

    def _trace_updates(self, roles: Sequence[str]) -> None:
        """Trace the next update of these roles."""
        if (settings := self.settings.trainer.profile_of(self.number)) is None:
            return
        for role in roles:
            path = self.run.trace_path(self.number, role)
            self.roles.learning[role].trace_next_update(path, micro_batches=settings.micro_batches).result()


def _mini_batches(batch: RemoteBatch, count: int, together: int) -> list[RemoteBatch]:
    """Consecutive parts of like size, in which so many samples as lie `together` stay so."""
    if together == 1:
        return batch.split(count)
    ranges = even_ranges(len(batch) // together, count)
    return [batch.select(range(together * each.start, together * each.stop)) for each in ranges]


def _weighted(batch: RemoteBatch, config: AlgorithmSettings, limit: int) -> RemoteBatch:
    """A mini-batch with the weight of each of its tokens in the loss, given the most tokens of a response."""
    weights = sequence_weights(
        batch.facts[COUNTED], config.loss_aggregation, normalising_length=config.normalising_length(limit)
    )
    return batch.with_facts(weights=weights)


def old_logprobs(batch: SampleBatch, *, config: AlgorithmSettings) -> Columns:
    """Column `old_logprobs`, for another name. Raises ValueError for samples that have none."""
    if batch.old_logprobs is None:
        raise ValueError("current_logprobs: the samples have no old_logprobs; expected Step.logprobs before the update")
    return Columns({"old_logprobs": batch.old_logprobs})


def tell_failures(where: str, result: RewardResult) -> None:
    """One line on stderr where a reward function failed; the log of the reward's rank has them all."""
    if result.failures:
        count = f"{len(result.failures)} failures of reward functions"
        log.warning(f"{where}: {count}; first, {result.failures[0]}")
