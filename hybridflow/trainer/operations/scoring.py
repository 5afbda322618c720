"""Scores of a step's samples: of reward or cost functions, and of a scoring model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.data.prompts import Prompts
from hybridflow.errors.log import log
from hybridflow.metrics.logger import Timer
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.result import RewardResult, check_given
from hybridflow.roles.config import ScoringModel
from hybridflow.roles.groups import FunctionRewardGroup, JudgeGroup, ValueGroup
from hybridflow.roles.reward import reward_result
from hybridflow.rollout.source import RolloutSource
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.trainer.operations.settings import StepSettings
from hybridflow.trainer.samples.texts import sample_texts
from hybridflow.trainer.startup.role_startup import Roles, judging
from hybridflow.trainer.startup.run_setup import Run
from hybridflow.trainer.step_record import Scores, StepRecord


@dataclass(frozen=True)
class SampleScoring:
    """The functions and models that score samples, by the kind of their score, "reward" or "cost".

    Args:
        functions: groups that call the functions.
        configs: of these functions.
        models: groups of the scoring models.
        settings: of these models.
        judge: that functions ask; None without one.
        prompts: of training.
    """

    functions: Mapping[str, FunctionRewardGroup]
    configs: Mapping[str, RewardConfig]
    models: Mapping[str, ValueGroup]
    settings: Mapping[str, ScoringModel]
    judge: JudgeGroup | None
    prompts: Prompts

    @classmethod
    def of(
        cls, roles: Roles, configs: Mapping[str, RewardConfig], settings: Mapping[str, ScoringModel], prompts: Prompts
    ) -> SampleScoring:
        """The functions and models of a run's roles."""
        models = {what: roles.scalar[role] for what in settings if (role := f"{what}_model") in roles.scalar}
        return cls(roles.functions, configs, models, settings, roles.judge, prompts)

    @property
    def ranks(self) -> int:
        """Most data-parallel ranks of functions or models."""
        return max((group.layout.dp for group in (*self.functions.values(), *self.models.values())), default=1)

    def score(
        self, what: str, batch: RemoteBatch, given: RewardResult | None, where: str
    ) -> tuple[Scores, dict[str, float]]:
        """Score samples; functions score while the model does.

        Args:
            what: "reward" or "cost".
            batch: as it was generated: the call waits for no column that a model still computes.
            given: scores of the functions, of samples that have them already.
            where: names the step and phase in lines about failures.

        Returns:
            Scores of the samples, and metrics of the judge.
        """
        scoring = self.models[what].score(batch) if what in self.models else None
        total, kept = torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool)
        result: RewardResult | None = None
        model: Tensor | None = None
        values: dict[str, float] = {}
        if what in self.functions:
            result, values = self._of_functions(what, batch, given)
            log_failures(where, result)
            total, kept = result.total, ~result.dropped
        if scoring is not None:
            model = scoring.per_sample()["score"]
            total = total + self.settings[what].weight * model
        return Scores(batch.per_sample["sample_ids"], total, kept, result, model), values

    def _of_functions(
        self, what: str, batch: RemoteBatch, given: RewardResult | None
    ) -> tuple[RewardResult, dict[str, float]]:
        with judging(self.judge) as judged:
            if given is None:
                examples = self.prompts.at(batch.per_sample["prompt_indices"].tolist())
                given = reward_result(self.functions[what].score(batch, examples=examples, what=what))
        return given, judged

    def check(self, what: str, result: RewardResult) -> None:
        """Raise UserError if a function failed on all samples of a step."""
        check_given(result, self.configs[what].functions)


@dataclass(frozen=True)
class StepScores:
    """Scores of one step's samples, kept in its record.

    Args:
        scoring: functions and models.
        source: of the samples, which may have scored them already.
        run: with the prompts of training, and the tokenizer of texts.
        record: of the step.
        phases: file of the run's current phase.
        number: of the step.
        settings: of the step's operations.
    """

    scoring: SampleScoring
    source: RolloutSource
    run: Run
    record: StepRecord
    phases: PhaseFile
    number: int
    settings: StepSettings

    def add(self, what: str, batch: RemoteBatch, *, baseline: bool, partial: bool) -> tuple[Tensor, Tensor]:
        """Score samples.

        Args:
            what: "reward" or "cost".
            batch: of B samples.
            baseline: True if the samples are not trained on, and are in no metric.
            partial: True if the step scores several batches, which `check_joined` checks together.

        Returns:
            (B,) scores, and the rows of those that are not dropped.

        Raises:
            UserError: a function failed on all samples.
        """
        self.phases.enter("reward")
        record, latency, times = self.record, f"{what}/latency_ms", dict[str, float]()
        generated = batch.as_generated()
        with Timer(times, latency):
            given = self.source.rewards(what, batch.per_sample["sample_ids"].tolist())
            where = f"step {self.number}, {self.phases.phase}"
            scores, judged = self.scoring.score(what, generated, given, where)
            record.values |= judged
            if scores.result is not None and partial:
                record.in_parts.add(what)
            elif scores.result is not None:
                self.scoring.check(what, scores.result)
        rows = scores.kept.nonzero()[:, 0]
        if not baseline:
            record.values[latency] = record.values.get(latency, 0.0) + times[latency]
            if what == "reward":
                if not record.scores.get(what):
                    self.add_texts(generated.select(rows), scores.total[rows])
                prompts = batch.per_sample["prompt_indices"][rows]
                record.add_rewards(prompts, scores.total[rows], self.run.train, self.settings.passing)
            record.add_scores(what, scores)
        return scores.total, rows

    def add_texts(self, batch: RemoteBatch, rewards: Tensor) -> None:
        """Add some samples as texts. `rewards`: (B,)."""
        count, characters = self.settings.texts
        examples, tokenizer = self.run.train.examples, self.run.tokenizer
        self.record.texts += sample_texts(batch, rewards, examples, tokenizer, count=count, characters=characters)

    def check_joined(self) -> None:
        """Raise UserError if a function failed on all samples of all partial batches."""
        for what in self.record.in_parts:
            if (scores := self.record.scores.get(what)) and (result := Scores.join(scores).result) is not None:
                self.scoring.check(what, result)


def log_failures(where: str, result: RewardResult) -> None:
    """One line on stderr where a reward function failed; the log of the reward's rank has them all."""
    if result.failures:
        count = f"{len(result.failures)} failures of reward functions"
        log.warning(f"{where}: {count}; first, {result.failures[0]}")
