"""Settings of the held-out sets that a run is evaluated on: `evaluation:`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import Field, ValidationError, field_validator

from engine3d.rollout.config import Alterations, SamplingConfig
from engine3d.settings import MOST_SAMPLES, MOST_TOKENS, Settings
from hybridflow.config.run import CheckpointConfig
from hybridflow.data.config import DataConfig
from hybridflow.data.files.config import FileSource
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import (
    ACCURACY,
    LENGTH,
    PREFERENCE,
    PREFERENCE_LOSS,
    PREFERENCE_MARGIN,
    REWARD,
    SCORE,
    TRUNCATED,
    Measure,
    figure_names,
)
from hybridflow.rewards.config import RewardConfig
from hybridflow.rollout.config import RolloutRole

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_SCORER = "evaluation."
"""Prefix of a set's name in that of its own reward functions, among those of the run."""
_EXACT_MATCH = "arithmetic"
"""The builtin reward that is 1 for a text that is exactly the answer and 0 for any other: its mean is an accuracy."""
_OF_PAIRS = ("prompts", "interval", "before_train")
"""Settings of a set that is measured without engines."""


class EvaluationSet(Settings):
    """A held-out set, measured in a run and by `hybridflow evaluate`; its metrics are `eval/NAME/...`, those of the set
    `eval` are `eval/...`. The set `eval` is there without being named where `data` holds out prompts: with its
    defaults."""

    data: FileSource | None = None
    """Files of its prompts; null for the set `eval` alone, whose prompts are those that `data` holds out."""
    reward: RewardConfig | None = None
    """The reward functions of this set; those of the run if null."""
    prompts: int | None = Field(None, ge=1)
    """Only the first prompts; all of them if null."""
    samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Responses to each prompt: k of `mean@k`, `pass@k` and `maj@k`."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of these responses. 0 takes the most likely token, for one response alone."""
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Most tokens of a response; as in `rollout.sampling` if null."""
    sampling: Alterations = Alterations()
    """Other settings of their sampling; the rest is as in `rollout.sampling`."""
    passing: float = 1.0
    """Smallest reward of a response that passes."""
    interval: int | None = Field(None, ge=1)
    """Steps between measurements; none if null. There is one after the last step in any case."""
    before_train: bool = True
    """Measure before the first step."""
    texts: int = Field(16, ge=0, le=1024)
    """Prompts whose responses are kept as texts, for the report; spread evenly over the set."""

    @field_validator("data", mode="after")
    @classmethod
    def _has_no_share(cls, data: FileSource | None) -> FileSource | None:
        if data is not None and data.weight != FileSource.model_fields["weight"].default:
            raise ValueError(
                "weight is set, which is of training prompts; expected none in a set, all of which is measured"
            )
        return data


@dataclass(frozen=True)
class PlannedSet:
    """A set with all that it takes from other settings.

    Args:
        name: of the set.
        settings: its own.
        sampling: of its responses.
        reward: the functions that score them; None where the reward model does, or where there are no responses.
        pairs: True if it is measured on pairs of `data`, without engines.
        environment: in which each sample is an episode; None without.
    """

    name: str
    settings: EvaluationSet
    sampling: SamplingConfig
    reward: RewardConfig | None
    pairs: bool = False
    environment: EnvironmentConfig | None = None

    @property
    def scorer(self) -> str | None:
        """The name of its functions among those of the run; None where the reward model scores."""
        if self.reward is None:
            return None
        return f"{_SCORER}{self.name}" if self.settings.reward is not None else "reward"

    @property
    def votes(self) -> bool:
        """True if its responses vote for `maj@k`: where functions see their texts."""
        return self.reward is not None and self.environment is None

    @property
    def measure(self) -> Measure:
        """The figure that sums it up."""
        if self.pairs:
            return PREFERENCE
        if self.reward is None:
            return SCORE
        exact = [(function.path, function.weight) for function in self.reward.functions] == [(_EXACT_MATCH, 1.0)]
        return ACCURACY if exact else REWARD

    @property
    def metrics(self) -> list[str]:
        """Names of its metrics, without the ends of intervals."""
        names = [PREFERENCE, PREFERENCE_LOSS, PREFERENCE_MARGIN]
        if not self.pairs:
            of_responses = figure_names(self.settings.samples, votes=self.votes, measure=self.measure)
            names = [*of_responses, LENGTH, TRUNCATED]
        return [metrics.of_set(self.name, figure) for figure in names]

    def due(self, step: int, last: int) -> bool:
        """True if it is measured after a step; 0 is before the first."""
        if step == 0:
            return self.settings.before_train
        interval = self.settings.interval
        return step == last or (interval is not None and step % interval == 0)


def planned_sets(
    given: Mapping[str, EvaluationSet | None],
    data: DataConfig,
    rollout: RolloutRole,
    reward: RewardConfig | None,
    *,
    pairs: bool,
    environment: EnvironmentConfig | None = None,
) -> dict[str, PlannedSet]:
    """Every set of a recipe with what it takes from the rest of it.

    Args:
        given: the sets by name; None takes one away, also the set `eval` that is there without being named.
        data, rollout, reward: of the recipe.
        pairs: True if sets are measured on pairs of `data`, without engines.
        environment: of episodes; None without.

    Raises:
        ValueError: tokens cannot be drawn so; names the set.
    """
    unnamed = {metrics.EVAL: EvaluationSet()} if data.holds_out_prompts and metrics.EVAL not in given else {}
    return {
        name: PlannedSet(
            name=name,
            settings=settings,
            sampling=_sampling(name, settings, rollout),
            reward=None if pairs else settings.reward or reward,
            pairs=pairs,
            environment=environment,
        )
        for name, settings in {**given, **unnamed}.items()
        if settings is not None
    }


def _sampling(name: str, given: EvaluationSet, rollout: RolloutRole) -> SamplingConfig:
    changed = given.sampling.model_dump() | {"temperature": given.temperature}
    changed["max_new_tokens"] = given.max_new_tokens or rollout.sampling.max_new_tokens
    try:
        return SamplingConfig(**rollout.sampling.model_dump() | changed)
    except ValidationError as error:
        raise ValueError(f"evaluation.{name}: {error.errors()[0]['ctx']['error']}") from None


def set_errors(sets: Mapping[str, PlannedSet], data: DataConfig, rollout: RolloutRole, algorithm: str) -> Iterator[str]:
    """Yield a line for each set that cannot be measured as its settings say.

    Args:
        sets: of the recipe.
        data: of the recipe.
        rollout: its engines.
        algorithm: its name.
    """
    for name, planned in sets.items():
        setting, settings = f"evaluation.{name}", planned.settings
        if not _NAME.fullmatch(name):
            yield f"evaluation: {name!r} is no name of a set, expected letters, digits, _ and -"
        if planned.pairs:
            yield from _pair_errors(planned, algorithm)
            continue
        if settings.data is None and name != metrics.EVAL:
            yield f"{setting}.data is missing, expected {setting}.data.path"
        elif settings.data is None and not data.holds_out_prompts:
            yield (
                f"{setting}.data is missing with data.source={data.source}, which holds out no prompts; expected "
                f"{setting}.data.path, or {setting}=null"
            )
        if planned.sampling.temperature == 0:
            if settings.samples > 1:
                yield (
                    f"{setting}.samples={settings.samples} with temperature=0, which would draw the same text "
                    f"{settings.samples} times; expected a temperature above 0, or samples=1"
                )
            if cut := [cut for cut in ("top_p", "top_k", "min_p") if cut in planned.sampling.altered]:
                yield (
                    f"{setting}.sampling.{cut[0]} is set with temperature=0, which takes the most likely token; "
                    "expected a temperature above 0"
                )
        if (drafts := rollout.engine.draft_tokens) and (altered := list(planned.sampling.altered)):
            yield (
                f"{setting}.sampling.{altered[0]} was not tried with rollout.engine.draft_tokens={drafts}; expected "
                "one of them"
            )
        if planned.sampling.min_p > 0 and rollout.engine.deterministic:
            yield (
                f"{setting}.sampling.min_p is set with rollout.engine.deterministic=true, where SGLang cannot sample "
                "with it; expected one of them"
            )


def _pair_errors(planned: PlannedSet, algorithm: str) -> Iterator[str]:
    """Settings of responses, which are not generated where the data have them."""
    why = f"algorithm.name={algorithm}, which learns from responses that the data have, without engines"
    if planned.name != metrics.EVAL:
        yield f"evaluation.{planned.name} is set with {why}; expected evaluation.{metrics.EVAL} alone: held-out pairs"
        return
    for name, field in EvaluationSet.model_fields.items():
        if name not in _OF_PAIRS and getattr(planned.settings, name) != field.get_default(call_default_factory=True):
            yield (
                f"evaluation.{planned.name}.{name} is set with {why}; expected {', '.join(_OF_PAIRS)} alone: an "
                "evaluation is of held-out pairs"
            )


def keep_best_errors(
    checkpoint: CheckpointConfig, sets: Mapping[str, PlannedSet], steps: int, *, saves_first: bool
) -> Iterator[str]:
    """Why there would be no best checkpoint to keep, in a line.

    Args:
        checkpoint: of the recipe.
        sets: that are measured.
        steps: of the run.
        saves_first: whether there is a checkpoint before the first step.
    """
    best, save = checkpoint.keep_best, checkpoint.save_interval
    if best is None or save is None:
        return
    name = best.set_name
    if name not in sets or best.metric not in sets[name].metrics:
        measures = [metrics.of_set(other, planned.measure) for other, planned in sets.items()]
        there = sets[name].metrics if name in sets else measures
        expected = f"one of {', '.join(there)}" if there else "a set in evaluation, and a figure of it"
        yield f"checkpoint.keep_best.metric={best.metric} is not measured in this run, expected {expected}"
        return
    settings = sets[name].settings
    interval, first = settings.interval, saves_first and settings.before_train
    both = math.lcm(interval, save) if interval is not None else steps
    if both >= steps and not first:
        measured = f"every {interval} steps" if interval is not None else "after the last step alone"
        yield (
            f"checkpoint.keep_best.metric={best.metric} is measured {measured} and checkpoints are saved every {save}: "
            f"of {steps} steps only the last has both; expected checkpoint.save_interval to be a multiple of "
            f"evaluation.{name}.interval, or the other way round"
        )
