"""Measurement of the held-out sets: engines respond to their prompts, and the responses are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.checkpoint.set_results import MeasuredSet, learned_from, set_identity
from hybridflow.config.evaluation import PlannedSet
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import (
    LENGTH,
    TRUNCATED,
    ScoredResponse,
    estimates,
    over_prompts,
    with_intervals,
)
from hybridflow.rewards.result import RewardResult, function_metrics, reward_metrics
from hybridflow.rewards.votes import NO_VOTE
from hybridflow.roles.config import JudgeModel, ScoringModel
from hybridflow.roles.groups import FunctionRewardGroup, JudgeGroup, ValueGroup
from hybridflow.roles.reward import reward_result, set_votes
from hybridflow.rollout.rollouts import Responses, Samples
from hybridflow.rundir.file_names import EVALUATIONS
from hybridflow.rundir.samples.evaluation_texts import EvaluationText, text_file, write_texts
from hybridflow.trainer.operations.scoring import log_failures
from hybridflow.trainer.samples.texts import short_answer, shortened
from hybridflow.trainer.startup.role_startup import Roles, judging
from hybridflow.trainer.startup.run_setup import Run


@dataclass(frozen=True)
class Scored:
    """Scores of B responses.

    Args:
        rewards: (B,) float32; nan where a response got none, since a function failed on it.
        votes: (B,) int64 of `rewards.votes`; None where a reward model alone scores.
        metrics: of the functions, by their names, where there are several or they give metrics of their own.
    """

    rewards: Tensor
    votes: Tensor | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SetMeasurer:
    """Measures sets with the engines of a run, or of an evaluation alone.

    Args:
        sets: their prompts, by name.
        identities: of the sets: `set_identity`.
        learned: number of their prompts that the model trains on too, where that is known.
        samples_of: asks engines for responses.
        functions: who calls reward functions, by `PlannedSet.scorer`.
        reward_model: scores where there are no functions.
        judge: that functions ask.
        tokenizer: decodes responses.
        texts: directory for the texts of all sets.
        characters: of each text, at most.
    """

    sets: Mapping[str, Prompts]
    identities: Mapping[str, str]
    learned: Mapping[str, int]
    samples_of: Samples
    functions: Mapping[str, FunctionRewardGroup]
    reward_model: ValueGroup | None
    judge: JudgeGroup | None
    tokenizer: PreTrainedTokenizerBase
    texts: Path
    characters: int

    @classmethod
    def of_run(
        cls, run: Run, roles: Roles, samples: Samples, identities: Mapping[str, str], characters: int
    ) -> SetMeasurer:
        """Build the measurer of a run's sets."""
        return cls(
            sets=run.sets,
            identities=identities,
            learned={name: learned_from(prompts, (run.train, run.sft)) for name, prompts in run.sets.items()},
            samples_of=samples,
            functions=roles.functions,
            reward_model=roles.scalar.get("reward_model"),
            judge=roles.judge,
            tokenizer=run.tokenizer,
            texts=run.directory / EVALUATIONS,
            characters=characters,
        )

    def measure(self, planned: PlannedSet, step: int) -> MeasuredSet:
        """Generate responses to the prompts of a set, score them, and keep some as texts.

        Responses on which a reward function failed are in no figure, whatever its `on_failure` gives them.

        Args:
            planned: the set.
            step: after which it is measured.

        Raises:
            UserError: a reward function failed that is to stop the run, or failed on all responses.
        """
        responses = self.begin(planned)
        batch = responses.batch()
        return self.measure_responses(planned, batch, step, responses.rewards)

    def samples(self, planned: PlannedSet) -> int:
        """Count the responses of one measurement of a set."""
        return len(self.sets[planned.name]) * planned.settings.samples

    def begin(self, planned: PlannedSet, first_sample: int | None = None) -> Responses:
        """Ask engines for the responses to a set; `first_sample` as of `Samples.sample`."""
        prompts = self.sets[planned.name]
        draw = Draw(prompts, range(len(prompts)), range(len(prompts)))
        return self.samples_of.sample(draw, planned.sampling, planned.settings.samples, first_sample)

    def measure_responses(
        self, planned: PlannedSet, batch: RemoteBatch, step: int, rewards: RewardResult | None = None
    ) -> MeasuredSet:
        """Measure responses that are there, as `measure` does. `rewards`: of episodes, which have theirs."""
        scored = self._scored(planned, batch, f"step {step}, evaluation.{planned.name}", rewards)
        groups, rows = _by_prompt(batch, scored, planned.settings.passing)
        if not any(groups.values()):
            raise UserError(f"evaluation.{planned.name}: reward functions failed on all {len(batch)} responses")
        estimated = estimates(groups.values(), planned.settings.samples, votes=planned.votes, measure=planned.measure)
        values = with_intervals(estimated)
        values |= _of_lengths(batch, rows)
        kept = sum(map(len, groups.values()))
        measured = sum(1 for group in groups.values() if group)
        values |= {metrics.SET_PROMPTS: measured, metrics.SET_SAMPLES: kept}
        values[metrics.SET_LEFT_OUT] = len(batch) - kept
        values |= scored.metrics
        if planned.name in self.learned:
            values[metrics.SET_TRAINING] = self.learned[planned.name]
        self._keep_texts(planned, step, batch, scored, groups, rows)
        identity, samples = self.identities[planned.name], planned.settings.samples
        return MeasuredSet(identity, planned.measure, step, measured, samples, values)

    def _scored(self, planned: PlannedSet, batch: RemoteBatch, where: str, rewards: RewardResult | None) -> Scored:
        if rewards is not None:
            return _of_functions(rewards, where, None)
        if planned.scorer is None:
            assert self.reward_model is not None
            return Scored(self.reward_model.score(batch.as_generated()).per_sample()["score"], None)
        examples = self.sets[planned.name].at(batch.per_sample["prompt_indices"].tolist())
        call = self.functions[planned.scorer].score_set(batch, examples=examples, what=planned.scorer)
        with judging(self.judge):
            result = reward_result(call)
        return _of_functions(result, where, set_votes(call))

    def _keep_texts(
        self,
        planned: PlannedSet,
        step: int,
        batch: RemoteBatch,
        scored: Scored,
        groups: Mapping[int, list[ScoredResponse]],
        rows: Mapping[int, list[int]],
    ) -> None:
        """Write the first response to some prompts; what cannot be written does not end the run."""
        count = min(planned.settings.texts, len(rows))
        if not count:
            return
        prompts = list(rows)
        chosen = [prompts[number * len(prompts) // count] for number in range(count)]
        few = batch.as_generated().select([rows[prompt][0] for prompt in chosen]).fetch()
        texts, responses = (
            self.tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in (few.prompts(), few.responses())
        )
        examples = self.sets[planned.name].at(chosen)
        written = []
        for prompt, text, response in zip(chosen, texts, responses, strict=True):
            reward = float(scored.rewards[rows[prompt][0]])
            written.append(
                EvaluationText(
                    index=prompt,
                    prompt=shortened(text, self.characters),
                    response=shortened(response, self.characters),
                    answer=short_answer(examples[prompt].answer, self.characters),
                    reward=reward if reward == reward else None,
                    passing=sum(scored_response.passes for scored_response in groups[prompt]),
                    scored=len(groups[prompt]),
                )
            )
        path = text_file(self.texts, planned.name, step)
        try:
            write_texts(path, written)
        except OSError as error:
            log.warning(f"{path} cannot be written: {error.strerror}")


def _of_functions(result: RewardResult, where: str, votes: Tensor | None) -> Scored:
    """Scores of functions or environments, whose failures are logged."""
    log_failures(where, result)
    failed = torch.stack([result.dropped, *result.failed.values()]).any(dim=0)
    values = reward_metrics(result) if len(result.by_name) > 1 else function_metrics(result)
    values.pop(metrics.REWARD_DROPPED, None)
    return Scored(result.total.masked_fill(failed, torch.nan), votes, values)


def set_identities(
    planned_sets: Mapping[str, PlannedSet],
    sets: Mapping[str, Prompts],
    *,
    algorithm: str,
    judge: JudgeModel | None,
    reward_model: ScoringModel | None,
) -> dict[str, str]:
    """Identify the metrics of each set, by name, as `set_identity` does; `sets` has their prompts."""
    return {
        name: set_identity(planned, sets[name], algorithm=algorithm, judge=judge, reward_model=reward_model)
        for name, planned in planned_sets.items()
    }


def _by_prompt(
    batch: RemoteBatch, scored: Scored, passing: float
) -> tuple[dict[int, list[ScoredResponse]], dict[int, list[int]]]:
    """The scored responses to each prompt in the order in which they were drawn, and the rows of all of them."""
    rewards, passes = scored.rewards.tolist(), (scored.rewards >= passing).tolist()  # in the precision of rewards
    votes = scored.votes.tolist() if scored.votes is not None else [NO_VOTE] * len(rewards)
    rows_of_prompts: dict[int, list[int]] = {}
    order = batch.per_sample["sample_ids"].argsort().tolist()
    prompts = batch.per_sample["prompt_indices"].tolist()
    for row in order:
        rows_of_prompts.setdefault(prompts[row], []).append(row)
    groups = {
        prompt: [
            ScoredResponse(rewards[row], passes[row], votes[row] if votes[row] != NO_VOTE else None)
            for row in rows
            if rewards[row] == rewards[row]
        ]
        for prompt, rows in rows_of_prompts.items()
    }
    return groups, rows_of_prompts


def _of_lengths(batch: RemoteBatch, rows_of_prompts: Mapping[int, list[int]]) -> dict[str, float]:
    """Mean length of responses in tokens, and the share of truncated ones, with their intervals."""
    lengths = batch.per_sample["response_lengths"].double()
    truncated = (batch.per_sample["finish_reasons"] == FinishReason.LENGTH).double()
    values: dict[str, float] = {}
    for name, column, proportion in ((LENGTH, lengths, False), (TRUNCATED, truncated, True)):
        means = [float(column[rows].mean()) for rows in rows_of_prompts.values()]
        values |= over_prompts(means, proportion=proportion).named(name)
    return values
