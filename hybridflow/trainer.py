"""The loop: generate, reward, update, synchronise; evaluate before and after."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from engine3d.errors import EngineError
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.messages import Generation
from hybridflow import metrics
from hybridflow.algorithms.aggregation import token_weights
from hybridflow.algorithms.grpo import grpo_advantages
from hybridflow.batch import RolloutBatch, balanced_partition
from hybridflow.config import Recipe
from hybridflow.data.sampler import PromptSampler
from hybridflow.metrics import Metrics, Timer
from hybridflow.protocols import Shards
from hybridflow.rewards.functions import RewardFunctions, RewardResult
from hybridflow.roles.group import Roles, raise_failed_start, start_roles, wait_for
from hybridflow.roles.model import Update, update_metrics
from hybridflow.run import Prompts, Run, initial_spec, prepare
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
    with (
        start_roles(recipe, run) as roles,
        RewardFunctions(recipe.reward) as rewards,
        WeightSync(
            roles.actor, roles.rollout, initial_spec(recipe), recipe.rollout, run.directory / "weights"
        ) as weights,
        Metrics(recipe.metrics, run.directory, total_steps=recipe.trainer.steps) as sinks,
    ):
        before, after = Trainer(recipe, run, roles, rewards, weights, sinks).run()
    print(f"held-out accuracy: {before:.3f} -> {after:.3f} ({100 * (after - before):+.1f} points)", flush=True)
    return run.directory


class Trainer:
    """One run's loop over its roles."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        roles: Roles,
        rewards: RewardFunctions,
        weights: WeightSync,
        sinks: Metrics,
    ) -> None:
        self.recipe, self.facts, self.roles = recipe, run, roles
        self.rewards, self.weights, self.sinks = rewards, weights, sinks
        self.sampler = PromptSampler(len(run.train), recipe.seed + recipe.data.seed)
        self.version = 0
        self.samples_drawn = 0
        self.steps_without_update = 0

    def run(self) -> tuple[float, float]:
        """Warm up and train; the accuracy on the held-out prompts before and after the training steps."""
        settings = self.recipe.trainer
        self.rewards.load()
        wait_for(self.roles, "actor")
        found: dict[str, str] = self.roles.starting["actor"].result()[0]
        print("  ".join(f"{name} {version}" for name, version in found.items()), flush=True)
        if self.recipe.warmup is not None:
            self.warm_up()
        wait_for(self.roles, *self.roles.starting)
        self.synchronise({})
        before = after = self.evaluate(0)
        for step in range(1, settings.steps + 1):
            self.step(step)
            last = step == settings.steps
            if last or (settings.eval_interval and step % settings.eval_interval == 0):
                after = self.evaluate(step)
        if settings.export:
            self.roles.actor.export(self.facts.directory / "model").result()
        return before, after

    def step(self, number: int) -> None:
        """One step of the algorithm: the dataflow of GRPO."""
        values: dict[str, float] = {}
        with Timer(values, metrics.TRAIN_STEP_TIME):
            batch = self.generate(values)
            batch = self.reward(batch, values)
            batch = self.infer(batch, values)
            batch = batch.replace(advantages=grpo_advantages(batch, self.recipe.algorithm))
            self.update(batch, values)
            self.synchronise(values)
        self.sinks.log(number, values)

    # The nodes of the dataflow

    def generate(self, values: dict[str, float]) -> RolloutBatch:
        """Responses of the current policy to the next prompts."""
        first_group = self.sampler.position
        indices = self.sampler.next(self.recipe.trainer.prompts_per_step)
        with Timer(values, metrics.ROLLOUT_TIME) as timer:
            generations = self.sample(
                [self.facts.train.tokens[index] for index in indices],
                list(range(first_group, first_group + len(indices))),
                self.recipe.rollout.sampling,
                self.recipe.rollout.samples_per_prompt,
            )
        batch = self.batch(self.facts.train, indices, generations, first_group)
        lengths = batch.response_lengths
        values[metrics.ROLLOUT_THROUGHPUT] = int(lengths.sum()) / (timer.milliseconds / 1000)
        values[metrics.ROLLOUT_RESPONSE_LENGTH] = float(lengths.double().mean())
        values[metrics.ROLLOUT_TRUNCATED] = statistics.fmean(
            generation.finish_reason == "length" for group in generations for generation in group
        )
        return batch

    def reward(self, batch: RolloutBatch, values: dict[str, float]) -> RolloutBatch:
        """The batch with a reward for each sample."""
        with Timer(values, metrics.REWARD_LATENCY):
            result = self.score(self.facts.train, batch)
        for name, column in result.by_name.items():
            values[f"reward/{name}/mean"] = float(column.mean())
        values[metrics.REWARD_MEAN] = float(result.total.mean())
        values[metrics.REWARD_STD] = float(result.total.std(correction=0))
        return batch.replace(rewards=result.total)

    def infer(self, batch: RolloutBatch, values: dict[str, float]) -> RolloutBatch:
        """The batch with the log-probs that the update compares with: of the reference, and of the policy before it."""
        temperature = self.recipe.rollout.sampling.temperature
        with Timer(values, metrics.INFERENCE_TIME):
            columns = {}
            if self.roles.reference is not None:
                columns["ref_logprobs"] = self.roles.reference.logprobs(batch, temperature=temperature)
            if self.recipe.trainer.updates_per_step > 1:  # otherwise they are those of the update itself
                columns["old_logprobs"] = self.roles.actor.logprobs(batch, temperature=temperature)
            return batch.replace(**{name: future.result() for name, future in columns.items()})

    def update(self, batch: RolloutBatch, values: dict[str, float]) -> None:
        """The optimizer steps of one rollout."""
        algorithm = self.recipe.algorithm
        updates: list[list[Update]] = []
        self.weights.before_update(self.version + 1)
        with Timer(values, metrics.TRAIN_UPDATE_TIME):
            for _ in range(self.recipe.trainer.epochs):
                for mini_batch in batch.split(self.recipe.trainer.mini_batches):
                    weights = token_weights(
                        mini_batch.response_mask,
                        algorithm.loss_aggregation,
                        normalising_length=algorithm.loss_normalising_length,
                    )
                    updates.append(
                        self.roles.actor.update(
                            *self.balanced(mini_batch, weights),
                            algorithm=algorithm,
                            temperature=self.recipe.rollout.sampling.temperature,
                        ).result()
                    )
        values |= update_metrics(updates)
        applied = any(ranks[0].applied for ranks in updates)
        self.steps_without_update = 0 if applied else self.steps_without_update + 1
        if self.steps_without_update == _MOST_STEPS_WITHOUT_UPDATE:
            raise EngineError(
                f"actor: the gradient was not finite in all updates of {_MOST_STEPS_WITHOUT_UPDATE} steps in a row; "
                "nothing is learned"
            )

    def synchronise(self, values: dict[str, float]) -> None:
        """Bring the rollout engines to the actor's weights."""
        with Timer(values, metrics.SYNC_TIME):
            self.version += 1
            values |= self.weights.sync_weights(self.version)

    # Phases beside the steps

    def warm_up(self) -> None:
        """Supervised learning of the answers, before the first rollout."""
        settings = self.recipe.warmup
        assert settings is not None
        prompts, answers = self.facts.sft, self.facts.answers
        self.roles.actor.reset_optimizer(settings.optimizer).result()
        sampler = PromptSampler(len(prompts), self.recipe.seed + self.recipe.data.seed)
        for step in range(1, settings.steps + 1):
            raise_failed_start(self.roles)
            values: dict[str, float] = {}
            indices = sampler.next(settings.batch_size)
            given = [[Generation(answers[index], [0.0] * len(answers[index]), "stop", 0)] for index in indices]
            batch = self.batch(prompts, indices, given, 0)
            with Timer(values, metrics.TRAIN_UPDATE_TIME):
                weights = token_weights(batch.response_mask, "token-mean")
                update: list[Update] = self.roles.actor.supervise(*self.balanced(batch, weights)).result()
            self.sinks.log(step, values | update_metrics([update]), phase="sft")
        self.roles.actor.reset_optimizer(self.recipe.train.optimizer).result()

    def evaluate(self, step: int) -> float:
        """Mean reward of responses to the held-out prompts."""
        settings, prompts = self.recipe.trainer, self.facts.evaluation
        sampling = self.recipe.rollout.sampling.model_copy(update={"temperature": settings.eval_temperature})
        generations = self.sample(prompts.tokens, list(range(len(prompts))), sampling, settings.eval_samples)
        batch = self.batch(prompts, range(len(prompts)), generations, 0)
        accuracy = float(self.score(prompts, batch).total.mean())
        self.sinks.log(step, {metrics.EVAL_ACCURACY: accuracy}, phase="eval")
        return accuracy

    # Between the roles

    def sample(
        self, prompts: list[list[int]], seeds: list[int], sampling: SamplingConfig, samples_per_prompt: int
    ) -> list[list[Generation]]:
        """Generations for each prompt, from all engines."""
        future = self.roles.rollout.generate(prompts, seeds, sampling=sampling, samples_per_prompt=samples_per_prompt)
        generations: list[list[Generation]] = future.result()
        return generations

    def score(self, prompts: Prompts, batch: RolloutBatch) -> RewardResult:
        """The rewards of a batch of responses to `prompts`."""
        texts = self.facts.tokenizer.batch_decode(batch.responses(), skip_special_tokens=True)
        examples = [prompts.examples[index] for index in batch.prompt_indices.tolist()]
        return self.rewards.evaluate(
            texts, [example.prompt for example in examples], [example.answer for example in examples]
        )

    def batch(
        self, prompts: Prompts, indices: Sequence[int], generations: list[list[Generation]], first_group: int
    ) -> RolloutBatch:
        """Generations as a batch; every sample gets an id of its own and the group of its draw."""
        rows = [
            (index, first_group + place, generation)
            for place, (index, group) in enumerate(zip(indices, generations, strict=True))
            for generation in group
        ]
        first_sample, self.samples_drawn = self.samples_drawn, self.samples_drawn + len(rows)
        return RolloutBatch.from_generations(
            prompts=[prompts.tokens[index] for index, _, _ in rows],
            responses=[generation.token_ids for _, _, generation in rows],
            logprobs=[generation.logprobs for _, _, generation in rows],
            sample_ids=range(first_sample, self.samples_drawn),
            group_ids=[group for _, group, _ in rows],
            prompt_indices=[index for index, _, _ in rows],
            policy_versions=[generation.weight_version for _, _, generation in rows],
            finish_reasons=[generation.finish_reason for _, _, generation in rows],
            pad_token_id=self.facts.tokenizer.pad_token_id,
        )

    def balanced(self, batch: RolloutBatch, weights: torch.Tensor) -> tuple[Shards, Shards]:
        """Batch and token weights, cut for the actor's data-parallel ranks into parts of like length."""
        parts = balanced_partition(batch.sequence_lengths.tolist(), self.roles.actor.layout.dp)
        return Shards(tuple(batch.select(part) for part in parts)), Shards(tuple(weights[part] for part in parts))
