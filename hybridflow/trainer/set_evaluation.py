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
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.checkpoint.set_results import MeasuredSet, learned_from, set_identity
from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.recipe import Recipe
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
from hybridflow.rewards.result import figure_metrics, reward_metrics
from hybridflow.rewards.votes import NO_VOTE
from hybridflow.roles.groups import FunctionRewardGroup, JudgeGroup, ValueGroup
from hybridflow.roles.reward import reward_result, set_votes
from hybridflow.rollout.source import Samples
from hybridflow.rundir.evaluation_texts import EvaluationText, text_file, write_texts
from hybridflow.rundir.file_names import EVALUATIONS
from hybridflow.trainer.role_startup import Roles, judging
from hybridflow.trainer.run_setup import Run
from hybridflow.trainer.sample_texts import short_answer, shortened
from hybridflow.trainer.step import tell_failures
from hybridflow.workers.future import Future


@dataclass(frozen=True)
class Scored:
    """What became of B responses.

    Args:
        rewards: (B,) float32; nan where a response got none, since a function failed on it.
        votes: (B,) int64 of `rewards.votes`; None where a reward model alone scores.
        figures: of the functions, by their names, where there are several or they give figures of their own.
    """

    rewards: Tensor
    votes: Tensor | None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SetMeasurer:
    """Measures sets with the engines of a run, or of an evaluation alone.

    Args:
        sets: their prompts, by name.
        identities: of the sets: `set_identity`.
        learned: how many of their prompts the model learns from too, where that is known.
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
    def of_run(cls, recipe: Recipe, run: Run, roles: Roles, samples: Samples) -> SetMeasurer:
        """For the sets of a run, while it goes on."""
        return cls(
            sets=run.sets,
            identities=set_identities(recipe, run.sets),
            learned={name: learned_from(prompts, (run.train, run.sft)) for name, prompts in run.sets.items()},
            samples_of=samples,
            functions=roles.functions,
            reward_model=roles.scalar.get("reward_model"),
            judge=roles.judge,
            tokenizer=run.tokenizer,
            texts=run.directory / EVALUATIONS,
            characters=recipe.metrics.sample_characters,
        )

    def measure(self, planned: PlannedSet, step: int) -> MeasuredSet:
        """Let the engines respond to the prompts of a set, score the responses, and keep some as texts.

        Responses on which a reward function failed are in no figure, whatever its `on_failure` gives them.

        Args:
            planned: the set.
            step: after which it is measured.

        Raises:
            UserError: a reward function failed that is to stop the run, or failed on all responses.
        """
        return self.measure_responses(planned, self.begin(planned).batch(), step)

    def samples(self, planned: PlannedSet) -> int:
        """How many responses a measurement of a set is of."""
        return len(self.sets[planned.name]) * planned.settings.samples

    def begin(self, planned: PlannedSet, first_sample: int | None = None) -> Future[SampleBatch]:
        """Ask engines for the responses to a set; `first_sample` as of `Samples.sample`."""
        prompts = self.sets[planned.name]
        draw = Draw(prompts, range(len(prompts)), range(len(prompts)))
        return self.samples_of.sample(draw, planned.sampling, planned.settings.samples, first_sample)

    def measure_responses(self, planned: PlannedSet, batch: RemoteBatch, step: int) -> MeasuredSet:
        """As `measure`, of responses that are there."""
        scored = self._scored(planned, batch, f"step {step}, evaluation.{planned.name}")
        groups, places = _by_prompt(batch, scored, planned.settings.passing)
        if not any(groups.values()):
            raise UserError(f"evaluation.{planned.name}: reward functions failed on all {len(batch)} responses")
        found = estimates(groups.values(), planned.settings.samples, votes=planned.votes, measure=planned.measure)
        figures = with_intervals(found)
        figures |= _of_lengths(batch, places)
        kept = sum(map(len, groups.values()))
        measured = sum(1 for group in groups.values() if group)
        figures |= {metrics.SET_PROMPTS: measured, metrics.SET_SAMPLES: kept}
        figures[metrics.SET_LEFT_OUT] = len(batch) - kept
        figures |= scored.figures
        if planned.name in self.learned:
            figures[metrics.SET_TRAINING] = self.learned[planned.name]
        self._keep_texts(planned, step, batch, scored, groups, places)
        identity, samples = self.identities[planned.name], planned.settings.samples
        return MeasuredSet(identity, planned.measure, step, measured, samples, figures)

    def _scored(self, planned: PlannedSet, batch: RemoteBatch, where: str) -> Scored:
        if planned.scorer is None:
            assert self.reward_model is not None
            return Scored(self.reward_model.score(batch.as_generated()).facts()["score"], None)
        examples = self.sets[planned.name].at(batch.facts["prompt_indices"].tolist())
        call = self.functions[planned.scorer].score_set(batch, examples=examples, what=planned.scorer)
        with judging(self.judge):
            result = reward_result(call)
        tell_failures(where, result)
        failed = torch.stack([result.dropped, *result.failed.values()]).any(dim=0)
        figures = reward_metrics(result) if len(result.by_name) > 1 else figure_metrics(result)
        figures.pop(metrics.REWARD_DROPPED, None)
        return Scored(result.total.masked_fill(failed, torch.nan), set_votes(call), figures)

    def _keep_texts(
        self,
        planned: PlannedSet,
        step: int,
        batch: RemoteBatch,
        scored: Scored,
        groups: Mapping[int, list[ScoredResponse]],
        places: Mapping[int, list[int]],
    ) -> None:
        """Write the first response to some prompts; what cannot be written does not end the run."""
        count = min(planned.settings.texts, len(places))
        if not count:
            return
        prompts = list(places)
        chosen = [prompts[place * len(prompts) // count] for place in range(count)]
        few = batch.as_generated().select([places[prompt][0] for prompt in chosen]).fetch()
        texts, responses = (
            self.tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in (few.prompts(), few.responses())
        )
        examples = self.sets[planned.name].at(chosen)
        found = []
        for prompt, text, response in zip(chosen, texts, responses, strict=True):
            reward = float(scored.rewards[places[prompt][0]])
            found.append(
                EvaluationText(
                    index=prompt,
                    prompt=shortened(text, self.characters),
                    response=shortened(response, self.characters),
                    answer=short_answer(examples[prompt].answer, self.characters),
                    reward=reward if reward == reward else None,
                    passing=sum(each.passes for each in groups[prompt]),
                    scored=len(groups[prompt]),
                )
            )
        path = text_file(self.texts, planned.name, step)
        try:
            write_texts(path, found)
        except OSError as error:
            log.warning(f"{path} cannot be written: {error.strerror}")


def set_identities(recipe: Recipe, sets: Mapping[str, Prompts]) -> dict[str, str]:
    """Identify the figures of each set of a recipe: `set_identity`, by name; `sets` has their prompts."""
    return {name: set_identity(recipe, each, sets[name]) for name, each in recipe.sets.items()}


def _by_prompt(
    batch: RemoteBatch, scored: Scored, passing: float
) -> tuple[dict[int, list[ScoredResponse]], dict[int, list[int]]]:
    """The scored responses to each prompt in the order in which they were drawn, and the rows of all of them."""
    rewards, passes = scored.rewards.tolist(), (scored.rewards >= passing).tolist()  # in the precision of rewards
    votes = scored.votes.tolist() if scored.votes is not None else [NO_VOTE] * len(rewards)
    places: dict[int, list[int]] = {}
    order = batch.facts["sample_ids"].argsort().tolist()
    prompts = batch.facts["prompt_indices"].tolist()
    for row in order:
        places.setdefault(prompts[row], []).append(row)
    groups = {
        prompt: [
            ScoredResponse(rewards[row], passes[row], votes[row] if votes[row] != NO_VOTE else None)
            for row in rows
            if rewards[row] == rewards[row]
        ]
        for prompt, rows in places.items()
    }
    return groups, places


def _of_lengths(batch: RemoteBatch, places: Mapping[int, list[int]]) -> dict[str, float]:
    """Mean length of responses in tokens, and the share of truncated ones, with their intervals."""
    lengths = batch.facts["response_lengths"].double()
    truncated = (batch.facts["finish_reasons"] == FinishReason.LENGTH).double()
    found: dict[str, float] = {}
    for name, column, proportion in ((LENGTH, lengths, False), (TRUNCATED, truncated, True)):
        means = [float(column[rows].mean()) for rows in places.values()]
        found |= over_prompts(means, proportion=proportion).named(name)
    return found
