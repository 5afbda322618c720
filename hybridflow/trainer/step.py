"""One step of a run: the operations that algorithms compose, on the run's roles."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
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
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.metrics.sample_file import SampleText
from hybridflow.rewards.result import RewardResult, check_given
from hybridflow.roles.model import Update, update_metrics
from hybridflow.roles.reward import reward_result
from hybridflow.roles.value import NAMES
from hybridflow.rollout.source import Rollout, RolloutSource
from hybridflow.rundir.progress import PhaseFile
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.correcting import Corrected, corrected, tell_empty
from hybridflow.trainer.event_log import Event, learned_event
from hybridflow.trainer.given_responses import GivenSource
from hybridflow.trainer.role_startup import Roles, judging
from hybridflow.trainer.run_setup import Run
from hybridflow.trainer.sample_store import LearnedSamples
from hybridflow.trainer.sample_texts import answer_texts, sample_texts
from hybridflow.trainer.source_figures import SourceFigures
from hybridflow.trainer.step_figures import Scores, rollout_metrics
from hybridflow.trainer.step_traces import trace_rollout, trace_updates
from hybridflow.trainer.weight_sync import NoEngines, WeightSync
from hybridflow.workers.future import Future

_JUDGES = ("reward_model", "cost_model")
_CRITICS: dict[str, ValueKind] = {"critic": "reward", "cost_critic": "cost"}


@dataclass(frozen=True)
class Machinery:
    """What all steps of a run share."""

    recipe: Recipe
    run: Run
    roles: Roles
    weights: WeightSync | NoEngines
    phases: PhaseFile
    source: RolloutSource
    controllers: Controllers
    contract: Contract
    given: GivenSource | None = None
    """The responses that the data have, where no engines run."""

    def texts(self, batch: RemoteBatch, rewards: Tensor, prompts: Prompts) -> list[SampleText]:
        """Some of these samples as texts: as many as `metrics.samples_per_step`.

        Args:
            batch: with the responses.
            rewards: (B,).
            prompts: of the phase.
        """
        settings = self.recipe.metrics
        return sample_texts(
            batch,
            rewards,
            prompts.examples,
            self.run.tokenizer,
            count=settings.samples_per_step,
            characters=settings.sample_characters,
        )


@dataclass
class TrainerStep(Step[Any]):
    """One step of a run.

    Args:
        machinery: of the run.
        number: of the step, from 1.
        version: of the weights that the step makes.
        poll: looks after the checkpoint that is being written; called between two phases.
    """

    machinery: Machinery
    number: int
    version: int
    poll: Callable[[], None]
    values: dict[str, float] = field(default_factory=dict)
    """The figures of the step, by metric name."""
    tokens: int = 0
    """Of the step's prompts and responses."""
    stale: bool = False
    """Whether an older policy may have made the responses, of whose log-probs only the engines' are left. Without a
    correction, the ratio of the loss is then to that policy."""
    updates: list[list[Update]] = field(default_factory=list)
    """For each optimizer step of the actor, what its ranks told."""
    updates_begun: int = 0
    """Optimizer steps of the actor."""
    texts: list[SampleText] = field(default_factory=list)
    """Some of the step's samples as texts, with their rewards."""
    learned: list[RemoteBatch] = field(default_factory=list)
    """What the step has learned from."""
    baselines: dict[int, float] = field(default_factory=dict)
    """What rewards were compared with, by group, where that is no reward of the group's samples."""
    events: list[Event] = field(default_factory=list)
    """What has decided what is learned from; see `event_log`."""
    _recalled: set[int] = field(default_factory=set)
    _in_parts: set[str] = field(default_factory=set)
    """What was scored in parts: rewards, or costs."""
    _rollouts: list[Rollout] = field(default_factory=list)
    _scores: dict[str, list[Scores]] = field(default_factory=dict)
    _by_source: SourceFigures = field(default_factory=SourceFigures)
    _passes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each prompt how many of its responses passed, and how many there were."""
    _told: dict[str, tuple[float, int]] = field(default_factory=dict)
    _under_way: list[Future[Any]] = field(default_factory=list)
    _teaching: Future[Columns] | None = None
    _began: float = math.nan

    @property
    def config(self) -> Any:
        return self.machinery.controllers.config(self.number)

    @property
    def multiplier(self) -> LagrangeMultiplier:
        multiplier = self.machinery.controllers.multiplier
        assert multiplier is not None
        return multiplier

    @property
    def replay(self) -> ReplayBuffer:
        replay = self.machinery.controllers.replay
        assert replay is not None
        return replay

    @property
    def prompts_per_step(self) -> int:
        return self.machinery.recipe.trainer.prompts_per_step

    @property
    def least_prompts(self) -> int:
        roles, samples = self.machinery.roles, self.machinery.recipe.rollout.samples_per_prompt
        judges = [*roles.functions.values(), *(group for role, group in roles.scalar.items() if role in _JUDGES)]
        ranks = max((group.layout.dp for group in judges), default=1)
        engines = roles.rollout.layout.dp if roles.rollout is not None else 1
        return max(engines, -(-ranks // samples))

    def response_limits(self, batch: RemoteBatch) -> Tensor:
        table = self.machinery.recipe.rollout.sampling_table
        prompts = batch.lengths - batch.facts["response_lengths"]
        limits = [table.for_prompt(tokens).max_new_tokens for tokens in prompts.tolist()]
        return torch.tensor(limits, dtype=torch.int64)

    def generator(self, name: str) -> torch.Generator:
        text = f"{self.machinery.recipe.seed}:{self.number}:{name}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        return torch.Generator().manual_seed(seed)

    # Responses

    def draw(self, count: int | None = None) -> Draw:
        if self.machinery.roles.rollout is not None:
            self.machinery.phases.enter("rollout")
        draw = self.machinery.source.draw(count)
        self.events += self.machinery.source.take_events()
        return draw

    def given(self, draw: Draw) -> RemoteBatch:
        given, source = self.machinery.given, self.machinery.source
        assert given is not None
        batch = given.batch(draw, source.reserve_samples(PAIR * len(draw.indices)))
        self.tokens += int(batch.lengths.sum())
        self.texts += self.machinery.texts(batch, batch.facts["rewards"], self.machinery.run.train)
        return batch

    def generate(self, draw: Draw) -> RemoteBatch:
        """Responses of the current policy, `rollout.samples_per_prompt` to each prompt.

        With `trainer.max_staleness` those of the policy before it, and the engines go on with the next step's prompts.
        """
        self.machinery.phases.enter("rollout")
        if not self._rollouts:
            machinery = self.machinery
            trace_rollout(machinery.recipe.trainer, self.number, machinery.run, machinery.roles)
        rollout, serving = self.machinery.source.rollout(draw, self.number), self.version - 1
        self._rollouts.append(rollout)
        batch = rollout.batch
        self.tokens += int(batch.lengths.sum())
        self.values |= rollout_metrics(self._rollouts, serving)
        self.values |= self.machinery.source.take_metrics()
        # A resumed run may hold a rollout that was made ahead, and make no more of them.
        older = bool((batch.facts["policy_versions"] < serving).any())
        self.stale |= self.machinery.recipe.trainer.max_staleness > 0 or older
        self.poll()  # files were written while the engines generated
        return batch

    def recall(self, samples: SampleBatch) -> RemoteBatch:
        self.stale = True
        self._recalled.update(samples.sample_ids.tolist())
        return RemoteBatch.of(samples)

    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        self.machinery.phases.enter("rollout")
        sampling = self.machinery.recipe.rollout.sampling_table.greedy()
        with Timer(self.values, metrics.BASELINE_TIME):
            return self.machinery.source.sample(draw, sampling, 1).batch()

    # Models beside the actor

    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        roles, recipe = self.machinery.roles, self.machinery.recipe
        temperature = recipe.rollout.sampling.temperature
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
        several = self.machinery.recipe.trainer.updates_per_step > 1
        return several and not self.stale and bool(self.config.needs_engines)

    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int = 0, of_student: bool = False) -> RemoteBatch:
        roles, asked = self.machinery.roles, batch.as_generated()
        assert roles.teacher is not None
        if top_k and of_student:
            best = roles.actor.top_tokens(asked, count=top_k)
            batch, asked = self._with_columns(batch, {}, best), asked.with_columns(best)
        temperature = self.machinery.recipe.rollout.sampling.temperature
        self._teaching = roles.teacher.teacher_logprobs(asked, temperature=temperature, top_k=top_k)
        return self._with_columns(batch, {}, self._teaching)

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        models, columns = self.machinery.roles.scalar, {"critic": "values", "cost_critic": "cost_values"}
        generated = batch.as_generated()
        return self._with_columns(
            batch, {column: models[role].values(generated) for role, column in columns.items() if role in models}
        )

    def estimate(
        self, batch: RemoteBatch, function: Callable[..., Columns], role: str, **arguments: float
    ) -> tuple[RemoteBatch, Moments]:
        self.wait_for_columns()
        group = self.machinery.roles.learning[role]
        future = group.apply(batch, function=function, arguments={"config": self.config, **arguments})
        notes: list[Estimated] = future.notes()
        for critic in notes[0].critics:
            name = NAMES[critic].explained_variance
            self.values[name] = explained_variance(note.critics[critic] for note in notes)
        return batch.with_columns(future), Moments.merge(note.advantages for note in notes)

    def apply(self, batch: RemoteBatch, function: Callable[..., Columns], **arguments: Any) -> Applied:
        self.wait_for_columns()
        return self.machinery.roles.actor.apply(
            batch, function=function, arguments={"config": self.config, **arguments}
        )

    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        if self._recomputes and not self.updates_begun:  # found already: of these weights
            return batch.with_columns(current_logprobs=self.apply(batch, old_logprobs))
        temperature = self.machinery.recipe.rollout.sampling.temperature
        columns = self.machinery.roles.actor.logprobs(batch.as_generated(), temperature=temperature)
        return batch.with_columns(current_logprobs=columns)

    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        config = self.config
        if not (config.needs_reference and config.kl_in == "reward"):
            return 0.0
        penalty: Tensor = config.kl_coef * self.apply(batch, sequence_kl).facts()["kl"]
        return penalty

    def tell(self, figures: Mapping[str, Tensor]) -> None:
        for name, figure in figures.items():
            total, count = self._told.get(name, (0.0, 0))
            self._told[name] = total + float(figure.sum()), count + len(figure)
        self.values |= {name: total / count for name, (total, count) in self._told.items() if count}

    def _with_columns(
        self, batch: RemoteBatch, columns: Mapping[str, Future[Columns]], *unnamed: Future[Columns]
    ) -> RemoteBatch:
        if (columns or unnamed) and not self._under_way:
            self._began = time.perf_counter()
        self._under_way += [*columns.values(), *unnamed]
        return batch.with_columns(*unnamed, **columns)

    def wait_for_columns(self) -> None:
        """Until the columns are there that were asked for; from here on the driver does nothing else."""
        if self._under_way:
            self.machinery.phases.enter("infer")
            for future in self._under_way:
                future.wait()
            self._under_way.clear()
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
        phases, roles, recipe = self.machinery.phases, self.machinery.roles, self.machinery.recipe
        phases.enter("reward")
        latency, times = f"{what}/latency_ms", dict[str, float]()
        result, score = None, None
        with Timer(times, latency):
            model, generated = recipe.scoring.get(what), batch.as_generated()
            scoring = roles.scalar[f"{what}_model"].score(generated) if model is not None else None
            total, kept = torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool)
            if what in roles.functions:
                result = self.machinery.source.rewards(what, batch.facts["sample_ids"].tolist())
                with judging(roles.judge) as judged:
                    if result is None:
                        examples = self.machinery.run.train.at(batch.facts["prompt_indices"].tolist())
                        result = reward_result(roles.functions[what].score(generated, examples=examples, what=what))
                if part:
                    self._in_parts.add(what)
                else:
                    check_given(result, recipe.functions[what].functions)
                self.values |= judged
                tell_failures(f"step {self.number}, {phases.phase}", result)
                total, kept = result.total, ~result.dropped
            if model is not None and scoring is not None:
                score = scoring.facts()["score"]
                total = total + model.weight * score
        rows = kept.nonzero()[:, 0]
        if not baseline:
            scores = self._scores.setdefault(what, [])
            if what == "reward" and not scores:
                self.texts += self.machinery.texts(generated.select(rows), total[rows], self.machinery.run.train)
            scores.append(Scores(batch.facts["sample_ids"], total, kept, result, score))
            joined = Scores.join(scores)
            self.values |= joined.metrics(what) if joined.kept.any() else {}
            self.values[latency] = self.values.get(latency, 0.0) + times[latency]
            if what == "reward":
                self._count_passes(batch.facts["prompt_indices"][rows], total[rows])
                self._by_source.add(batch.facts["prompt_indices"][rows], total[rows])
                self.values |= self._by_source.metrics(self.machinery.run.train)
            if not part:
                self._check_enough(len(rows), len(batch), what)
        return batch.with_facts(**{fact: total}).select(rows)

    def _count_passes(self, prompts: Tensor, rewards: Tensor) -> None:
        """Which responses pass, for a curriculum by difficulty."""
        files = self.machinery.recipe.data.files
        if files is None or files.difficulty is None:
            return
        for prompt, passes in zip(prompts.tolist(), (rewards >= files.difficulty.passing).tolist(), strict=True):
            passed, drawn = self._passes.get(prompt, (0, 0))
            self._passes[prompt] = passed + passes, drawn + 1

    @property
    def pass_rates(self) -> dict[int, float]:
        """The share of its responses that passed, of each prompt whose rate a curriculum asks for."""
        return {prompt: passed / drawn for prompt, (passed, drawn) in self._passes.items()}

    def take_scores(self, made: TrainerStep) -> None:
        """Have what another step has found of the samples that this one learns from, and add the time that it took."""
        for name, value in made.values.items():
            self.values[name] = self.values.get(name, 0.0) + value if name.endswith("_ms") else value
        self.tokens += made.tokens
        self._rollouts += made._rollouts
        if self._rollouts:
            self.values |= rollout_metrics(self._rollouts, self.version - 1)
        self.events += made.events
        self.stale |= made.stale
        self._recalled |= made._recalled
        self._in_parts |= made._in_parts
        for prompt, (passed, drawn) in made._passes.items():
            before = self._passes.get(prompt, (0, 0))
            self._passes[prompt] = before[0] + passed, before[1] + drawn
        for what, scores in made._scores.items():
            self._scores.setdefault(what, []).extend(scores)
            joined = Scores.join(self._scores[what])
            self.values |= joined.metrics(what) if joined.kept.any() else {}
        if made._scores:
            self._by_source.add_all(made._by_source)
            self.values |= self._by_source.metrics(self.machinery.run.train)

    def learned_samples(self) -> LearnedSamples:
        """What the step has learned from, for the run's sample store."""
        named = {what: Scores.join(scores).by_name(what) for what, scores in self._scores.items()}
        by_name = {name: figures for each in named.values() for name, figures in each.items()}
        learned = tuple(self.learned)
        rows, answers = dict[int, str](), dict[int, str]()
        if self.machinery.recipe.samples.store:  # both may have to be read from the data's files
            train = self.machinery.run.train
            prompts = dict.fromkeys(index for batch in learned for index in batch.facts["prompt_indices"].tolist())
            rows, answers = train.identities(prompts), answer_texts(train.at(list(prompts)))
        return LearnedSamples(self.number, self.version, learned, by_name, self.baselines, rows, answers)

    @property
    def least_samples(self) -> int:
        """The fewest of which every data-parallel rank of every role has one in each mini-batch."""
        roles = self.machinery.roles
        replicas = max(group.layout.dp for group in (roles.actor, *roles.models.values()))
        return self.machinery.recipe.trainer.mini_batches * replicas

    def _check_enough(self, kept: int, count: int, what: str) -> None:
        if kept < (least := self.least_samples):
            raise EngineError(
                f"step {self.number}: {kept} of {count} samples have a {what}, expected at least {least}, one for each "
                "data-parallel rank and mini-batch"
            )

    # Learning

    def update(self, experience: Experience, *, value_clip: float | None = None, critics_only: bool = False) -> None:
        self.wait_for_columns()
        machinery, batch = self.machinery, experience.batch
        config: AlgorithmSettings = self.config
        for what in self._in_parts:  # of each of which alone a function may fail on all samples
            if (scores := self._scores.get(what)) and (result := Scores.join(scores).result) is not None:
                check_given(result, machinery.recipe.functions[what].functions)
        if len(batch) < (least := self.least_samples):
            raise EngineError(
                f"step {self.number}: {len(batch)} samples are left to learn from, expected at least {least}"
            )
        if config.needs_engines:
            recalled = frozenset(self._recalled)
            machinery.contract.check(batch, step=self.number, serving=self.version - 1, recalled=recalled)
        self.learned.append(batch)
        self.baselines |= experience.baselines
        machinery.phases.enter("update")
        models, trainer = machinery.roles.scalar, machinery.recipe.trainer
        critics = {role: kind for role, kind in _CRITICS.items() if role in models}
        machinery.weights.before_update(self.version)
        of_actor = Corrected(batch) if critics_only else corrected(self, batch)
        limit = machinery.recipe.rollout.sampling_table.longest_response
        parts = _mini_batches(of_actor.batch, trainer.mini_batches, load(config.name).together)
        mini_batches = [_weighted(each, config, limit) for each in parts]
        mini_batches *= trainer.epochs
        made = {n: each for n, each in enumerate(mini_batches) if not critics_only and of_actor.has_weight(each)}
        learning = [*critics, *(["actor"] if made else [])]
        trace_updates(trainer, self.number, learning, machinery.run, machinery.roles)
        calls: dict[str, list[Future[list[Update]]]] = {role: [] for role in (*critics, "actor")}
        with Timer(self.values, metrics.TRAIN_UPDATE_TIME):
            # One model after another: where they share devices, each has one turn.
            for role, kind in critics.items():
                calls[role] = [models[role].update_values(each, clip=value_clip, kind=kind) for each in mini_batches]
            calls["actor"] = [self._update_actor(each, config, experience.whiten) for each in made.values()]
            results = {role: [future.result() for future in futures] for role, futures in calls.items()}
        self.updates = results.pop("actor")
        self._tell_refused()
        self.events.append(learned_event(batch, self._recalled, parts, dict(zip(made, self.updates, strict=True))))
        if not critics_only:
            tell_empty(self, len(mini_batches) - len(made), len(mini_batches))
        self.values |= update_metrics(self.updates) if self.updates else {}
        for role, updates in results.items():
            self.values |= update_metrics(updates, NAMES[critics[role]])
        self._control(len(batch))

    def _update_actor(
        self, batch: RemoteBatch, config: AlgorithmSettings, whiten: Moments | None
    ) -> Future[list[Update]]:
        recipe, prepare = self.machinery.recipe, load(config.name).prepare
        correction = config.correction
        batch = batch if prepare is None else prepare(self, batch)
        self.updates_begun += 1
        return self.machinery.roles.actor.update(
            batch,
            algorithm=config,
            temperature=recipe.rollout.sampling.temperature,
            whitening=whiten,
            stale=self.stale,
            against_rollout=self.stale if correction is None else correction.against == "rollout",
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

    def _control(self, samples: int) -> None:
        """Let controllers of coefficients learn from the step."""
        self.values |= self.machinery.controllers.figures(self.number)
        self.machinery.controllers.learn(self.values, samples)


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
