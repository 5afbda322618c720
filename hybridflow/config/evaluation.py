"""Settings of the held-out sets that a run is evaluated on: `evaluation:`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import Field, ValidationError, field_validator

from engine3d.rollout.config import Alterations, SamplingConfig
from engine3d.settings import MOST_SAMPLES, MOST_TOKENS, Settings
from hybridflow.config.roles import RolloutRole
from hybridflow.config.run import CheckpointConfig, TrainerConfig
from hybridflow.data.files.config import FileSource
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import LENGTH, TRUNCATED, figure_names
from hybridflow.rewards.config import RewardConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_SCORER = "evaluation."
"""What the name of a set follows in that of its own reward functions, among those of the run."""


class EvaluationSet(Settings):
    """A held-out set, measured in a run and by `hybridflow evaluate`; its figures are `eval/NAME/...`."""

    data: FileSource
    reward: RewardConfig | None = None
    """The reward functions of this set; those of the run if null."""
    prompts: int | None = Field(None, ge=1)
    """Only the first prompts; all of them if null."""
    samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Responses to each prompt: k of `mean@k`, `pass@k` and `maj@k`."""
    temperature: float | None = Field(None, ge=0)
    """Of these responses; `trainer.eval_temperature` if null. 0 takes the most likely token, for one response alone."""
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Most tokens of a response; as in `rollout.sampling` if null."""
    sampling: Alterations | None = None
    """What else they are drawn by; as in `trainer.eval_sampling` if null."""
    passing: float = 1.0
    """Smallest reward of a response that passes."""
    interval: int | None = Field(None, ge=1)
    """Steps between measurements; `trainer.eval_interval` if null. There is one after the last step in any case."""
    before_train: bool | None = None
    """Measure before the first step; `trainer.eval_before_train` if null."""
    texts: int = Field(16, ge=0, le=1024)
    """Prompts of which the responses are kept as texts, for the report; evenly from the whole set."""

    @field_validator("data", mode="after")
    @classmethod
    def _has_no_share(cls, data: FileSource) -> FileSource:
        if data.weight != FileSource.model_fields["weight"].default:
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
        sampling: how its responses are drawn.
        reward: the functions that score them; None where the reward model does.
        interval: steps between measurements; None for none but the last.
        before_train: whether it is measured before the first step.
    """

    name: str
    settings: EvaluationSet
    sampling: SamplingConfig
    reward: RewardConfig | None
    interval: int | None
    before_train: bool

    @property
    def scorer(self) -> str | None:
        """The name of its functions among those of the run; None where the reward model scores."""
        if self.reward is None:
            return None
        return f"{_SCORER}{self.name}" if self.settings.reward is not None else "reward"

    @property
    def votes(self) -> bool:
        """Whether its responses vote for `maj@k`: where functions see their texts."""
        return self.reward is not None

    @property
    def metrics(self) -> list[str]:
        """The names of its figures, without the ends of intervals."""
        figures = [*figure_names(self.settings.samples, votes=self.votes), LENGTH, TRUNCATED]
        return [metrics.of_set(self.name, figure) for figure in figures]

    def due(self, step: int, last: int) -> bool:
        """Whether it is measured after a step; 0 is before the first."""
        if step == 0:
            return self.before_train
        return step == last or (self.interval is not None and step % self.interval == 0)


def planned_sets(
    sets: Mapping[str, EvaluationSet], trainer: TrainerConfig, rollout: RolloutRole, reward: RewardConfig | None
) -> dict[str, PlannedSet]:
    """Every set of a recipe with what it takes from the rest of it.

    Raises:
        ValueError: tokens cannot be drawn so; names the set.
    """
    return {
        name: PlannedSet(
            name=name,
            settings=each,
            sampling=_sampling(name, each, trainer, rollout),
            reward=each.reward or reward,
            interval=each.interval or trainer.eval_interval,
            before_train=trainer.eval_before_train if each.before_train is None else each.before_train,
        )
        for name, each in sets.items()
    }


def _sampling(name: str, given: EvaluationSet, trainer: TrainerConfig, rollout: RolloutRole) -> SamplingConfig:
    own = (given.sampling or trainer.eval_sampling).model_dump()
    own["temperature"] = trainer.eval_temperature if given.temperature is None else given.temperature
    own["max_new_tokens"] = given.max_new_tokens or rollout.sampling.max_new_tokens
    try:
        return SamplingConfig(**rollout.sampling.model_dump() | own)
    except ValidationError as error:
        raise ValueError(f"evaluation.{name}: {error.errors()[0]['ctx']['error']}") from None


def set_errors(sets: Mapping[str, PlannedSet], rollout: RolloutRole) -> Iterator[str]:
    """What cannot be measured so, a line each.

    Args:
        sets: of the recipe.
        rollout: its engines.
    """
    for name, each in sets.items():
        setting, settings = f"evaluation.{name}", each.settings
        if not _NAME.fullmatch(name):
            yield f"evaluation: {name!r} is no name of a set, expected letters, digits, _ and -"
        if each.sampling.temperature == 0:
            where = "temperature=0" if settings.temperature == 0 else "temperature=0 of trainer.eval_temperature"
            if settings.samples > 1:
                yield (
                    f"{setting}.samples={settings.samples} with {where}, which would draw the same text "
                    f"{settings.samples} times; expected a temperature above 0, or samples=1"
                )
            if cut := [cut for cut in ("top_p", "top_k", "min_p") if cut in each.sampling.altered]:
                yield (
                    f"{setting}.sampling.{cut[0]} is set with {where}, which takes the most likely token; expected a "
                    "temperature above 0"
                )
        if each.sampling.min_p > 0 and rollout.engine.deterministic:
            yield (
                f"{setting}.sampling.min_p is set with rollout.engine.deterministic=true, where SGLang cannot sample "
                "with it; expected one of them"
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
        there = sets[name].metrics if name in sets else [metrics.of_set(each, "pass@1") for each in sets]
        expected = f"one of {', '.join(there)}" if there else "a set in evaluation, and a figure of it"
        yield f"checkpoint.keep_best.metric={best.metric} is not measured in this run, expected {expected}"
        return
    interval, first = sets[name].interval, saves_first and sets[name].before_train
    both = math.lcm(interval, save) if interval is not None else steps
    if both >= steps and not first:
        measured = f"every {interval} steps" if interval is not None else "after the last step alone"
        yield (
            f"checkpoint.keep_best.metric={best.metric} is measured {measured} and checkpoints are saved every {save}: "
            f"of {steps} steps only the last has both; expected checkpoint.save_interval to be a multiple of "
            f"evaluation.{name}.interval, or the other way round"
        )
