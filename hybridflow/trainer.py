"""The loop: generate, reward, update, synchronise; evaluate before and after; save on the way."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine3d.checkpoint.hf import export_checkpoint
from engine3d.errors import EngineError
from engine3d.rollout.config import SamplingConfig
from hybridflow import metrics
from hybridflow.algorithms.advantages import group_relative_advantages
from hybridflow.algorithms.aggregation import sequence_weights
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.batch import FinishReason, RolloutBatch
from hybridflow.checkpoints import Checkpoints
from hybridflow.columns import COUNTED, Columns
from hybridflow.config import Recipe
from hybridflow.data.sampler import PromptSampler
from hybridflow.initial_model import initial_spec
from hybridflow.metrics import Metrics, Timer
from hybridflow.phase_file import PhaseFile
from hybridflow.remote_batch import RemoteBatch
from hybridflow.resume import inexact_because
from hybridflow.rewards.result import RewardResult, reward_metrics
from hybridflow.roles.group import Roles, raise_failed_start, start_roles, wait_for
from hybridflow.roles.model import Update, update_metrics
from hybridflow.roles.reward import reward_result
from hybridflow.roles.rollout import DrawnPrompt
from hybridflow.run import EXPORT, WEIGHTS, Prompts, Run, move_aside, prepare
from hybridflow.run_state import RandomState, RunState
from hybridflow.weight_sync import WeightSync

_MOST_STEPS_WITHOUT_UPDATE = 3


def train(recipe: Recipe) -> Path:
    """Run a recipe to its end.

    Returns:
        The run's directory.

    Raises:
        UserError: something that the user can put right.
        EngineError: a role failed; everything that was started is gone.
    """
    run = prepare(recipe)
    phases = PhaseFile(run.directory / "phase.json")
    phases.enter("start")
    resumed = run.resumption.state if run.resumption is not None else None
    steps_done = resumed.step if resumed is not None else None
    with Metrics(recipe.metrics, run.directory, total_steps=recipe.trainer.steps, resume_from_step=steps_done) as sinks:
        if resumed is not None and resumed.step >= recipe.trainer.steps:
            export_finished(recipe, run)
            before, after = resumed.accuracy_before, resumed.accuracy_after
        else:
            before, after = train_steps(recipe, run, sinks, phases)
    phases.enter("end")
    print(f"held-out accuracy: {before:.3f} -> {after:.3f} ({100 * (after - before):+.1f} points)", flush=True)
    return run.directory


def train_steps(recipe: Recipe, run: Run, sinks: Metrics, phases: PhaseFile) -> tuple[float, float]:
    """Start the roles, train, and end them; the accuracy before and after."""
    if recipe.checkpoint.save_interval is not None and (reasons := inexact_because(recipe)):
        print(f"checkpoints: a resumed run may differ from this one by {'; '.join(reasons)}", flush=True)
    with (
        Checkpoints(recipe, run, sinks) as checkpoints,
        start_roles(recipe, run) as roles,
        WeightSync(
            roles.actor, roles.rollout, initial_spec(recipe), recipe.rollout, run.directory / WEIGHTS
        ) as weights,
    ):
        return Trainer(recipe, run, roles, weights, sinks, checkpoints, phases).run()


def export_finished(recipe: Recipe, run: Run) -> None:
    """Export a run that has done all its steps, from its last checkpoint, if it has not been."""
    assert run.resumption is not None
    directory = run.directory / EXPORT
    print(f"resume: all {recipe.trainer.steps} steps are done", flush=True)
    if recipe.trainer.export and not directory.exists():
        export_checkpoint(run.resumption.directory, directory, dtype=recipe.train.dtype)


class Trainer:
    """One run's loop over its roles."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        roles: Roles,
        weights: WeightSync,
        sinks: Metrics,
        checkpoints: Checkpoints,
        phases: PhaseFile,
    ) -> None:
        self.recipe, self.facts, self.roles = recipe, run, roles
        self.weights, self.sinks = weights, sinks
        self.checkpoints, self.phases = checkpoints, phases
        self.sampler = PromptSampler(len(run.train), recipe.seed + recipe.data.seed)
        self.steps_done = 0
        self.version = 0
        self.samples_drawn = 0
        self.updates = 0
        self.steps_without_update = 0
        self.accuracy_before = self.accuracy_after = math.nan

    def run(self) -> tuple[float, float]:
        """Warm up and train, or go on; the accuracy on the held-out prompts before and after the training steps."""
        settings, resumption = self.recipe.trainer, self.facts.resumption
        self.phases.enter("start" if resumption is None else "load")
        wait_for(self.roles, "actor")
        found: dict[str, str] = self.roles.starting["actor"].result()[0]
        print("  ".join(f"{name} {version}" for name, version in found.items()), flush=True)
        if resumption is None or resumption.state is None:
            self.begin()
        else:
            self.go_on(resumption.state)
        for step in range(self.steps_done + 1, settings.steps + 1):
            self.step(step)
            if step == settings.steps or (settings.eval_interval and step % settings.eval_interval == 0):
                self.accuracy_after = self.evaluate(step)
            self.save(step)
        self.phases.enter("save")
        self.checkpoints.wait()
        if settings.export:
            self.export()
        return self.accuracy_before, self.accuracy_after

    def begin(self) -> None:
        """All that comes before the first step."""
        RandomState.seed(self.recipe.seed)
        if self.recipe.warmup is not None:
            self.warm_up()
        wait_for(self.roles, *self.roles.starting)
        self.synchronise({})
        self.accuracy_before = self.accuracy_after = self.evaluate(0)
        self.save(0)

    def go_on(self, state: RunState) -> None:
        """Be where the run was when `state` was taken; the engines serve the same version of the weights."""
        if (self.facts.directory / EXPORT).exists():
            move_aside(self.facts.directory / EXPORT)  # that of the same run, when it was to end sooner
        wait_for(self.roles, *self.roles.starting)
        order = state.sampler
        if self.recipe.checkpoint.accept:  # perhaps other prompts, or in another order
            order = self.sampler.state_dict() | {"position": order["position"]}
        self.sampler.load_state_dict(order)
        self.steps_done = self.phases.step = state.step
        self.samples_drawn, self.updates = state.samples_drawn, state.updates
        self.steps_without_update = state.steps_without_update
        self.accuracy_before, self.accuracy_after = state.accuracy_before, state.accuracy_after
        self.version = state.policy_version - 1
        self.synchronise({})
        state.random.restore()

    def state(self) -> RunState:
        """All that the driver knows and later steps depend on. Between two steps it holds no batch."""
        return RunState(
            step=self.steps_done,
            policy_version=self.version,
            samples_drawn=self.samples_drawn,
            sampler=self.sampler.state_dict(),
            updates=self.updates,
            steps_without_update=self.steps_without_update,
            accuracy_before=self.accuracy_before,
            accuracy_after=self.accuracy_after,
            random=RandomState.capture(),
            run=self.facts.identity,
            inputs=self.facts.inputs,
        )

    def save(self, step: int) -> None:
        """Look after the checkpoint that is under way, and begin one where it is due."""
        self.checkpoints.poll()
        if self.checkpoints.due(step):
            self.phases.enter("save")
            self.checkpoints.save({"actor": self.roles.actor}, self.state())

    def export(self) -> None:
        """Write the trained model as a HuggingFace directory."""
        self.roles.actor.export(self.facts.directory / EXPORT).result()

    def step(self, number: int) -> None:
        """One step of the algorithm: the dataflow of GRPO."""
        self.phases.step = number
        values: dict[str, float] = {}
        with Timer(values, metrics.TRAIN_STEP_TIME):
            batch = self.generate(values)
            self.checkpoints.poll()  # files were written while the engines generated
            batch = self.reward(batch, values)
            batch = self.infer(batch, values)
            self.update(batch.with_facts(advantages=self.advantages(batch)), values)
            self.synchronise(values)
        self.steps_done = number
        self.sinks.log(number, values)

    # The nodes of the dataflow

    def generate(self, values: dict[str, float]) -> RemoteBatch:
        """Responses of the current policy to the next prompts."""
        self.phases.enter("rollout")
        first_group = self.sampler.position
        indices = self.sampler.next(self.recipe.trainer.prompts_per_step)
        rollout = self.recipe.rollout
        with Timer(values, metrics.ROLLOUT_TIME) as timer:
            batch = self.sample(self.facts.train, indices, first_group, rollout.sampling, rollout.samples_per_prompt)
        lengths = batch.facts["response_lengths"]
        values[metrics.ROLLOUT_THROUGHPUT] = int(lengths.sum()) / (timer.milliseconds / 1000)
        values[metrics.ROLLOUT_RESPONSE_LENGTH] = float(lengths.double().mean())
        truncated = batch.facts["finish_reasons"] == FinishReason.LENGTH
        values[metrics.ROLLOUT_TRUNCATED] = float(truncated.double().mean())
        return batch

    def reward(self, batch: RemoteBatch, values: dict[str, float]) -> RemoteBatch:
        """The batch with a reward for each sample."""
        self.phases.enter("reward")
        with Timer(values, metrics.REWARD_LATENCY):
            result = reward_result(self.roles.reward.score(batch, split="train"))
        values |= reward_metrics(result)
        self.tell_failures(result)
        kept = (~result.dropped).nonzero()[:, 0]
        replicas = max(role.layout.dp for role in (self.roles.actor, self.roles.reference) if role is not None)
        if len(kept) < (least := self.recipe.trainer.mini_batches * replicas):
            raise EngineError(
                f"step {self.phases.step}: {len(kept)} of {len(batch)} samples have a reward, expected at least "
                f"{least}, one for each data-parallel rank and mini-batch"
            )
        return batch.with_facts(rewards=result.total).select(kept)

    def infer(self, batch: RemoteBatch, values: dict[str, float]) -> RemoteBatch:
        """The batch with the log-probs that the update compares with: of the reference, and of the policy before it."""
        self.phases.enter("infer")
        temperature = self.recipe.rollout.sampling.temperature
        with Timer(values, metrics.INFERENCE_TIME):
            columns = {}
            if self.roles.reference is not None:
                columns["ref_logprobs"] = self.roles.reference.logprobs(batch, temperature=temperature)
            if self.recipe.trainer.updates_per_step > 1:  # otherwise they are those of the update itself
                columns["old_logprobs"] = self.roles.actor.logprobs(batch, temperature=temperature)
            for future in columns.values():
                future.wait()
            return batch.with_columns(**columns)

    def advantages(self, batch: RemoteBatch) -> torch.Tensor:
        """(B,) float32: GRPO's advantage of each sample, which holds for each of its tokens."""
        rewards, config = batch.facts["rewards"], self.recipe.algorithm
        if config.needs_reference and config.kl_in == "reward":
            kl = self.roles.actor.apply(batch, function=sequence_kl, arguments={"config": config}).facts()
            rewards = rewards - config.kl_coef * kl["kl"]
        return group_relative_advantages(
            rewards, batch.facts["group_ids"], normalise_by_std=config.normalise_advantages_by_std
        )

    def update(self, batch: RemoteBatch, values: dict[str, float]) -> None:
        """The optimizer steps of one rollout."""
        self.phases.enter("update")
        algorithm = self.recipe.algorithm
        updates: list[list[Update]] = []
        self.weights.before_update(self.version + 1)
        with Timer(values, metrics.TRAIN_UPDATE_TIME):
            for _ in range(self.recipe.trainer.epochs):
                for mini_batch in batch.split(self.recipe.trainer.mini_batches):
                    weights = sequence_weights(
                        mini_batch.facts[COUNTED],
                        algorithm.loss_aggregation,
                        normalising_length=algorithm.loss_normalising_length,
                    )
                    updates.append(
                        self.roles.actor.update(
                            mini_batch.with_facts(weights=weights),
                            algorithm=algorithm,
                            temperature=self.recipe.rollout.sampling.temperature,
                        ).result()
                    )
        values |= update_metrics(updates)
        self.updates += len(updates)
        applied = any(ranks[0].applied for ranks in updates)
        self.steps_without_update = 0 if applied else self.steps_without_update + 1
        if self.steps_without_update == _MOST_STEPS_WITHOUT_UPDATE:
            raise EngineError(
                f"actor: the gradient was not finite in all updates of {_MOST_STEPS_WITHOUT_UPDATE} steps in a row; "
                "nothing is learned"
            )

    def synchronise(self, values: dict[str, float]) -> None:
        """Bring the rollout engines to the actor's weights."""
        self.phases.enter("sync")
        with Timer(values, metrics.SYNC_TIME):
            self.version += 1
            values |= self.weights.sync_weights(self.version)

    # Phases beside the steps

    def warm_up(self) -> None:
        """Supervised learning of the answers, before the first rollout."""
        self.phases.enter("warmup")
        settings = self.recipe.warmup
        assert settings is not None
        prompts, answers = self.facts.sft, self.facts.answers
        self.roles.actor.reset_optimizer(settings.optimizer).result()
        sampler = PromptSampler(len(prompts), self.recipe.seed + self.recipe.data.seed)
        for step in range(1, settings.steps + 1):
            raise_failed_start(self.roles)
            values: dict[str, float] = {}
            indices = sampler.next(settings.batch_size)
            batch = RemoteBatch.of(
                answered(
                    [prompts.tokens[index] for index in indices],
                    [answers[index] for index in indices],
                    self.facts.tokenizer.pad_token_id,
                )
            )
            with Timer(values, metrics.TRAIN_UPDATE_TIME):
                weights = sequence_weights(batch.facts[COUNTED], "token-mean")
                update: list[Update] = self.roles.actor.supervise(batch.with_facts(weights=weights)).result()
            self.sinks.log(step, values | update_metrics([update]), phase="sft")
        self.roles.actor.reset_optimizer(self.recipe.train.optimizer).result()

    def evaluate(self, step: int) -> float:
        """Mean reward of responses to the held-out prompts."""
        self.phases.enter("eval")
        settings, prompts = self.recipe.trainer, self.facts.evaluation
        sampling = self.recipe.rollout.sampling.model_copy(update={"temperature": settings.eval_temperature})
        batch = self.sample(prompts, range(len(prompts)), 0, sampling, settings.eval_samples)
        result = reward_result(self.roles.reward.score(batch, split="evaluation"))
        self.tell_failures(result)
        accuracy = float(result.total[~result.dropped].mean())
        failed = {name: value for name, value in reward_metrics(result).items() if name.endswith("/failed")}
        self.sinks.log(step, {metrics.EVAL_ACCURACY: accuracy} | failed, phase="eval")
        return accuracy

    # Between the roles

    def tell_failures(self, result: RewardResult) -> None:
        """One line on stderr where a reward function failed; the log of the reward's rank has them all."""
        if result.failures:
            count = f"{len(result.failures)} failures of reward functions"
            line = f"step {self.phases.step}, {self.phases.phase}: {count}; first, {result.failures[0]}"
            print(f"hybridflow: {line}", file=sys.stderr, flush=True)

    def sample(
        self, prompts: Prompts, indices: Sequence[int], first_group: int, sampling: SamplingConfig, samples: int
    ) -> RemoteBatch:
        """Samples for some prompts, from all engines; every sample gets an id of its own and the group of its draw."""
        first_sample, self.samples_drawn = self.samples_drawn, self.samples_drawn + len(indices) * samples
        drawn = [
            DrawnPrompt(prompts.tokens[index], index, first_group + place, first_sample + place * samples)
            for place, index in enumerate(indices)
        ]
        pad_token_id = self.facts.tokenizer.pad_token_id
        return self.roles.rollout.generate(
            drawn, sampling=sampling, samples_per_prompt=samples, pad_token_id=pad_token_id
        ).batch()


def sequence_kl(batch: RolloutBatch, *, config: AlgorithmConfig) -> Columns:
    """What is taken from the reward of each sample: fact `kl`, (b,), the sum of `reward_kl` over its counted tokens."""
    kl = reward_kl(batch, config)
    assert kl is not None
    return Columns(facts={"kl": kl.where(batch.response_mask, 0.0).sum(dim=1)})


def answered(prompts: Sequence[list[int]], answers: Sequence[list[int]], pad_token_id: int) -> RolloutBatch:
    """Prompts with given answers as responses, each a group of its own."""
    count = range(len(prompts))
    return RolloutBatch.from_generations(
        prompts=prompts,
        responses=answers,
        logprobs=[[0.0] * len(answer) for answer in answers],
        sample_ids=count,
        group_ids=count,
        prompt_indices=count,
        policy_versions=[0] * len(prompts),
        finish_reasons=[FinishReason.STOP] * len(prompts),
        pad_token_id=pad_token_id,
    )
