"""Results of a step: metrics, texts, events, scores. All rollouts of a step count as one."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.sample_table import ByName
from hybridflow.batch.worker_output import MISSING_ROUTES, OLDER_TOKENS, ROUTE_BYTES, joined_per_sample
from hybridflow.data.prompts import Prompts
from hybridflow.metrics import names as metrics
from hybridflow.metrics.expert_loads import ExpertLoads
from hybridflow.metrics.sinks.sample_file import SampleText
from hybridflow.rewards.result import RewardResult, join_results, reward_metrics
from hybridflow.roles.model import Update, routings
from hybridflow.rollout.rollouts import Rollout
from hybridflow.trainer.event_log import Event
from hybridflow.trainer.samples.store import TrainedSamples
from hybridflow.trainer.samples.texts import answer_texts


def rollout_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Lengths, times and staleness of responses, by metric name.

    Args:
        rollouts: of the step.
        version: of the weights before the step's.
    """
    per_sample = joined_per_sample([rollout.batch.per_sample for rollout in rollouts])
    lengths, values = per_sample["response_lengths"], {}
    seconds = [rollout.seconds for rollout in rollouts if rollout.seconds is not None]
    if len(seconds) == len(rollouts):
        values[metrics.ROLLOUT_TIME] = 1000 * sum(seconds)
        values[metrics.ROLLOUT_THROUGHPUT] = int(lengths.sum()) / sum(seconds)
    if (newest := per_sample.get("newest_versions")) is not None:
        values[metrics.STREAM_STALENESS_MAX] = int((version - per_sample["policy_versions"]).max())
        values[metrics.STREAM_MIXED_SHARE] = float((newest > per_sample["policy_versions"]).double().mean())
    if (missing := per_sample.get(MISSING_ROUTES)) is not None:
        tokens = per_sample["prompt_lengths"] + lengths - 1
        values[metrics.ROUTES_MISSING_SHARE] = int(missing.sum()) / max(1, int(tokens.sum()))
        values[metrics.ROUTES_MB] = int(per_sample[ROUTE_BYTES].sum()) / 1e6
        all_older = per_sample.get("newest_versions", per_sample["policy_versions"]) < version
        older = lengths.where(all_older, per_sample[OLDER_TOKENS])
        values[metrics.ROUTES_OLDER_SHARE] = int(older.sum()) / max(1, int(lengths.sum()))
    values[metrics.ROLLOUT_STALENESS] = float((version - per_sample["policy_versions"]).double().mean())
    values[metrics.ROLLOUT_RESPONSE_LENGTH] = float(lengths.double().mean())
    values[metrics.ROLLOUT_TRUNCATED] = float((per_sample["finish_reasons"] == FinishReason.LENGTH).double().mean())
    return values


@dataclass(frozen=True, eq=False)
class Scores:
    """Rewards, or costs, of B samples.

    Args:
        sample_ids: (B,) int64.
        total: (B,) float32: of functions and model.
        kept: (B,) bool: not dropped.
        result: of the functions; None where there are none.
        model: (B,) float32: of the scoring model, without its weight; None where there is none.
    """

    sample_ids: Tensor
    total: Tensor
    kept: Tensor
    result: RewardResult | None
    model: Tensor | None

    @staticmethod
    def join(scores: Sequence[Scores]) -> Scores:
        """Scores of several batches, in order; all have the same functions and models."""
        results = [scored.result for scored in scores if scored.result is not None]
        models = [scored.model for scored in scores if scored.model is not None]
        return Scores(
            torch.cat([scored.sample_ids for scored in scores]),
            torch.cat([scored.total for scored in scores]),
            torch.cat([scored.kept for scored in scores]),
            join_results(results) if results else None,
            torch.cat(models) if models else None,
        )

    def by_name(self, what: str) -> dict[str, ByName]:
        """Scores of each function, without its weight, and of the model. `what`: "reward" or "cost".

        Next to those of a function are its metrics and counts, by "FUNCTION/NAME": verdicts of programs, tool calls.
        """
        result = self.result
        columns = {} if result is None else {**result.by_name, **result.metrics, **result.counts}
        columns |= {} if self.model is None else {"model": self.model}
        return {f"{what}/{name}": ByName(self.sample_ids, values.float()) for name, values in columns.items()}

    def metrics(self, what: str) -> dict[str, float]:
        """Metrics by name. `what`: "reward" or "cost"."""
        values = reward_metrics(self.result, group=what) if self.result is not None else {}
        if self.model is not None:
            values[f"{what}/model/mean"] = float(self.model.mean())
        kept = self.total[self.kept]
        return values | {f"{what}/mean": float(kept.mean()), f"{what}/std": float(kept.std(correction=0))}


@dataclass
class RewardsBySource:
    """Sums of rewards over the samples of a step, by the index of their prompt."""

    _samples: Counter[int] = field(default_factory=Counter)
    _rewards: dict[int, float] = field(default_factory=dict)

    def add(self, prompts: Tensor, rewards: Tensor) -> None:
        """Add scored samples.

        Args:
            prompts: (B,) indices of their prompts.
            rewards: (B,).
        """
        for prompt, reward in zip(prompts.tolist(), rewards.tolist(), strict=True):
            self._samples[prompt] += 1
            self._rewards[prompt] = self._rewards.get(prompt, 0.0) + reward

    def add_all(self, other: RewardsBySource) -> None:
        """Add the samples of another one."""
        self._samples += other._samples
        for prompt, reward in other._rewards.items():
            self._rewards[prompt] = self._rewards.get(prompt, 0.0) + reward

    def metrics(self, prompts: Prompts) -> dict[str, float]:
        """Samples and mean reward of each source of the data that has some; none where there is one source."""
        sources = prompts.sources()
        if len(sources) < 2:
            return {}
        ends, samples, rewards = [end for _, end in sources], Counter[str](), dict[str, float]()
        for prompt, count in self._samples.items():
            label = sources[bisect.bisect_right(ends, prompt)][0]
            samples[label] += count
            rewards[label] = rewards.get(label, 0.0) + self._rewards[prompt]
        values: dict[str, float] = {}
        for label, count in samples.items():
            values[metrics.of_source(label, "samples")] = count
            values[metrics.of_source(label, "reward_mean")] = rewards[label] / count
        return values


@dataclass
class StepRecord:
    """Results of a step so far."""

    values: dict[str, float] = field(default_factory=dict)
    """Metrics by name."""
    tokens: int = 0
    """Tokens of prompts and responses."""
    stale: bool = False
    """True if an older policy may have made the responses, so that only the engines' log-probs of it are left. Without
    a correction, the ratio of the loss is then to that policy."""
    texts: list[SampleText] = field(default_factory=list)
    """Some samples as texts, with their rewards."""
    trained: list[RemoteBatch] = field(default_factory=list)
    """Batches that the step has trained on."""
    corrections: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Columns of `correction_metrics` of each of these batches, with a correction."""
    baselines: dict[int, float] = field(default_factory=dict)
    """Baseline reward of each group that is no reward of the group's samples."""
    expert_loads: dict[str, ExpertLoads] = field(default_factory=dict)
    """Loads of the experts of each role's model that has some."""
    events: list[Event] = field(default_factory=list)
    """Decisions on what is trained on; see `event_log`."""
    recalled: set[int] = field(default_factory=set)
    """Ids of samples that an algorithm has kept from earlier steps."""
    in_parts: set[str] = field(default_factory=set)
    """Kinds of scores that were found in several batches: "reward", "cost"."""
    rollouts: list[Rollout] = field(default_factory=list)
    scores: dict[str, list[Scores]] = field(default_factory=dict)
    """Scores of each batch, by their kind."""
    _by_source: RewardsBySource = field(default_factory=RewardsBySource)
    _passes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Passing responses and all responses, by the index of their prompt."""
    _means: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of the values of each metric that is a mean."""

    def add_rollout(self, rollout: Rollout, serving: int) -> None:
        """Add responses. `serving`: version of the weights before the step's."""
        self.rollouts.append(rollout)
        self.tokens += int(rollout.batch.lengths.sum())
        self.values |= rollout_metrics(self.rollouts, serving)

    def add_scores(self, what: str, scores: Scores) -> None:
        """Add the scores of a batch. `what`: "reward" or "cost"."""
        self.scores.setdefault(what, []).append(scores)
        self._log_scores(what)

    def add_rewards(self, prompt_indices: Tensor, rewards: Tensor, prompts: Prompts, passing: float | None) -> None:
        """Add rewards by prompt.

        Args:
            prompt_indices: (B,) of the samples.
            rewards: (B,).
            prompts: that the indices count.
            passing: least reward of a response that passes, for a curriculum by difficulty; None without one.
        """
        self._by_source.add(prompt_indices, rewards)
        self.values |= self._by_source.metrics(prompts)
        if passing is not None:
            for prompt, passes in zip(prompt_indices.tolist(), (rewards >= passing).tolist(), strict=True):
                self._add_passes(prompt, int(passes), 1)

    def add_means(self, columns: Mapping[str, Tensor]) -> None:
        """Add values of metrics, (k,) by name, of which the mean over all that were added is logged."""
        self._add_sums({name: (float(column.sum()), len(column)) for name, column in columns.items()})

    def add_all(self, other: StepRecord, serving: int, prompts: Prompts) -> None:
        """Add the results of another step, whose samples this one trains on, and the time that they took.

        Args:
            other: of the other step.
            serving: version of the weights before the step's.
            prompts: of training.
        """
        for name, value in other.values.items():
            adds = name.endswith("_ms") or name in metrics.SAMPLING_COUNTS
            self.values[name] = self.values.get(name, 0.0) + value if adds else value
        self._add_sums(other._means)
        self.tokens += other.tokens
        self.texts += other.texts
        self.rollouts += other.rollouts
        if self.rollouts:
            self.values |= rollout_metrics(self.rollouts, serving)
        self.events += other.events
        self.stale |= other.stale
        self.recalled |= other.recalled
        self.in_parts |= other.in_parts
        for prompt, passes in other._passes.items():
            self._add_passes(prompt, *passes)
        for what, scores in other.scores.items():
            self.scores.setdefault(what, []).extend(scores)
            self._log_scores(what)
        if other.scores:
            self._by_source.add_all(other._by_source)
            self.values |= self._by_source.metrics(prompts)

    @property
    def pass_rates(self) -> dict[int, float]:
        """Share of passing responses of each prompt, for a curriculum by difficulty."""
        return {prompt: passed / drawn for prompt, (passed, drawn) in self._passes.items()}

    def add_expert_loads(self, updates: Mapping[str, list[list[Update]]]) -> None:
        """Keep the loads of experts in the updates of each role."""
        for role, of_role in updates.items():
            if (loads := ExpertLoads.of(routings(of_role))) is not None:
                self.expert_loads[role] = loads

    def trained_samples(self, number: int, version: int, prompts: Prompts | None) -> TrainedSamples:
        """The samples that the step has trained on, for the run's sample store.

        Args:
            number: of the step.
            version: of the weights that it made.
            prompts: of training, which may have to be read from the data's files; None stores no prompts.
        """
        named = {what: Scores.join(scores).by_name(what) for what, scores in self.scores.items()}
        by_name = {name: columns for by_score in named.values() for name, columns in by_score.items()}
        rows, answers = dict[int, str](), dict[int, str]()
        if prompts is not None:
            indices = dict.fromkeys(_prompt_indices(self.trained))
            rows, answers = prompts.identities(indices), answer_texts(prompts.at(list(indices)))
        return TrainedSamples(number, version, tuple(self.trained), by_name, self.baselines, rows, answers)

    def _add_sums(self, sums: Mapping[str, tuple[float, int]]) -> None:
        for name, (added, number) in sums.items():
            total, count = self._means.get(name, (0.0, 0))
            self._means[name] = total + added, count + number
        self.values |= {name: total / count for name, (total, count) in self._means.items() if count}

    def _log_scores(self, what: str) -> None:
        joined = Scores.join(self.scores[what])
        self.values |= joined.metrics(what) if joined.kept.any() else {}

    def _add_passes(self, prompt: int, passed: int, drawn: int) -> None:
        before = self._passes.get(prompt, (0, 0))
        self._passes[prompt] = before[0] + passed, before[1] + drawn


def _prompt_indices(batches: Iterable[RemoteBatch]) -> Iterable[int]:
    for batch in batches:
        yield from batch.per_sample["prompt_indices"].tolist()
