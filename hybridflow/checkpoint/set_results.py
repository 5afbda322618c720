"""Measurements of a run's held-out sets, and the best checkpoint by one of their metrics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine3d.checkpoint.reading.inspect import DRIVER
from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, read_json_object
from hybridflow.environments.config import OF_EPISODES
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import ACCURACY, PREFERENCE, REWARD, SCORE, Measure
from hybridflow.rundir.atomic_files import replace_file

if TYPE_CHECKING:
    from hybridflow.config.evaluation import PlannedSet
    from hybridflow.config.run import BestConfig
    from hybridflow.data.prompts import Prompts
    from hybridflow.roles.config import JudgeModel, ScoringModel

RESULTS = "evaluation.json"
"""Measurements of a step that came after its checkpoint was complete: `last_measured` and `best` of driver.json."""

_HELD_OUT_ACCURACY = "held-out accuracy"
_WORDS: Mapping[Measure, tuple[str, str]] = {
    ACCURACY: ("accuracy", "prompts"),
    REWARD: ("mean reward", "prompts"),
    SCORE: ("mean reward model score", "prompts"),
    PREFERENCE: ("preference accuracy", "examples"),
}


@dataclass(frozen=True)
class MeasuredSet:
    """A measurement of a set.

    Args:
        identity: of its prompts, answers, rewards and sampling; two measurements compare only where it is the same.
        measure: the figure that sums it up.
        step: after which training step; 0 before the first.
        prompts: that have a scored response.
        samples: responses to each that were asked for.
        statistics: values and ends of intervals, by the names of `evaluation_statistics`.
    """

    identity: str
    measure: Measure
    step: int
    prompts: int
    samples: int
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The figure that sums it up."""
        return self.statistics[self.measure]

    @property
    def subject(self) -> str:
        """The figure and its prompts, in words."""
        learned = int(self.statistics.get(metrics.SET_TRAINING, 0))
        if self.measure == ACCURACY and not learned:
            return _HELD_OUT_ACCURACY
        kind = {0: "held-out ", self.prompts: "training "}.get(learned, "")
        some = "" if kind else f" ({learned} of them training prompts)"
        what, of = _WORDS[self.measure]
        return f"{what} of {self.prompts} {kind}{of}{some}"

    def metrics(self, name: str) -> dict[str, float]:
        """Values by metric name, for the set of this name."""
        return {metrics.of_set(name, figure): value for figure, value in self.statistics.items()}


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far.

    Args:
        metric: by which it is.
        step: of the checkpoint.
        value: of the metric there.
        identity: of the set that it is a figure of.
    """

    metric: str
    step: int
    value: float
    identity: str


def set_identity(
    planned: PlannedSet,
    prompts: Prompts,
    *,
    algorithm: str,
    judge: JudgeModel | None,
    reward_model: ScoringModel | None,
) -> str:
    """Identify all that the metrics of a set depend on, but for the weights.

    Args:
        planned: the set.
        prompts: of the set.
        algorithm: its name, which pairs are measured by.
        judge: that functions may ask.
        reward_model: which scores where there are no functions.
    """
    from hybridflow.roles.judge_identity import asked_judge_identity  # imports torch

    rewards: list[Any] = []
    if planned.pairs:
        rewards = [algorithm]
    elif planned.reward is not None:
        functions = planned.reward.functions
        rewards = [(function.name, function.path, function.weight, function.arguments) for function in functions]
        rewards += asked_judge_identity(functions, judge)
    elif reward_model is not None:
        rewards = [str(reward_model.path.absolute())]
    if planned.environment is not None:
        rewards += [planned.environment.model_dump(mode="json", include=set(OF_EPISODES))]
    answers = [example.answer for example in prompts.examples]
    sampling, settings = planned.sampling.model_dump(mode="json"), planned.settings
    hashes = [int(text_hash) for text_hash in prompts.text_hashes()]
    content = json.dumps([hashes, answers, rewards, sampling, settings.samples, settings.passing], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def learned_from(prompts: Prompts, phases: Sequence[Prompts]) -> int:
    """Count the prompts of a set that are among those that the model trains on.

    Args:
        prompts: of the set.
        phases: the prompts of every phase that learns.
    """
    learned = [phase.text_hashes() for phase in phases if len(phase)]
    return int(np.isin(prompts.text_hashes(), np.concatenate(learned)).sum()) if learned else 0


def best_of(
    settings: BestConfig | None, before: Best | None, sets: Mapping[str, MeasuredSet], step: int
) -> Best | None:
    """The best checkpoint once there is one of after this step.

    Args:
        settings: by which figure; None for no best one.
        before: the best one without it. One by another figure, or of other prompts, is not compared with.
        sets: the last measurement of each set.
        step: of the checkpoint.
    """
    if settings is None:
        return None
    name, figure = settings.set_and_figure
    measured = sets.get(name)
    if before is not None and before.metric != settings.metric:
        before = None
    if measured is None or measured.step != step or not math.isfinite(measured.statistics.get(figure, math.nan)):
        return before
    here = Best(settings.metric, step, measured.statistics[figure], measured.identity)
    if before is None or before.identity != here.identity or settings.is_better(here.value, before.value):
        return here
    return before


def write_results(checkpoint: Path, last_measured: Mapping[str, MeasuredSet], best: Best | None) -> None:
    """Add to a whole checkpoint what the evaluation of its step has measured, which was due when it was saved.

    Raises:
        OSError: it cannot be written.
    """
    document = {
        "last_measured": {name: dataclasses.asdict(measured) for name, measured in last_measured.items()},
        "best": dataclasses.asdict(best) if best is not None else None,
    }
    replace_file(checkpoint / RESULTS, json.dumps(document, indent=1) + "\n")


def _driver_facts(checkpoint: Path) -> dict[str, Any]:
    """The driver's state of a checkpoint, with what was measured later; nothing of a checkpoint of weights alone."""
    path, results = checkpoint / DRIVER, checkpoint / RESULTS
    document = read_json_object(path, MOST_LIST_BYTES) if path.exists() else {}
    if document.get("evaluation_due") and results.exists():
        document |= read_json_object(results, MOST_LIST_BYTES)
    return document


def read_best(checkpoint: Path) -> Best | None:
    """The best checkpoint of a run once the given one was whole; None where none was kept as such.

    Raises:
        UserError: its driver's state cannot be read.
    """
    best = _driver_facts(checkpoint).get("best")
    try:
        return None if best is None else Best(**best)
    except TypeError:
        raise UserError(f"{checkpoint / DRIVER}: best is {best!r}, expected what a run writes") from None


def measured_at(checkpoint: Path) -> dict[str, MeasuredSet]:
    """The run's measurements at the step of a checkpoint, by set; none of a checkpoint of weights alone.

    Raises:
        UserError: the driver's state cannot be read.
    """
    document = _driver_facts(checkpoint)
    try:
        last = {name: MeasuredSet(**fields) for name, fields in document.get("last_measured", {}).items()}
    except (TypeError, AttributeError):
        raise UserError(f"{checkpoint / DRIVER}: last_measured is damaged, expected what a run writes") from None
    return {name: measured for name, measured in last.items() if measured.step == document["step"]}


def value_of(checkpoint: Path, metric: str) -> float | None:
    """A metric of a set that was measured at the step of a checkpoint; None where it was not."""
    set_and_figure = metrics.set_of(metric)
    measured = measured_at(checkpoint).get(set_and_figure[0]) if set_and_figure is not None else None
    return measured.statistics.get(set_and_figure[1]) if set_and_figure is not None and measured is not None else None


def compared_with_run(name: str, here: MeasuredSet, run: MeasuredSet, temperature: float) -> str:
    """Compare a measurement of a checkpoint with the run's own of the same checkpoint, in one line.

    Args:
        name: of the set.
        here, run: the two measurements.
        temperature: of the responses; 0 for the most likely tokens.
    """
    figure = f"mean@{run.samples}"
    line = f"{name}: the run measured {figure} {_with_interval(run, figure)} of this checkpoint"
    if run.identity != here.identity:
        return f"{line} with other prompts, answers, rewards or sampling: not comparable"
    if run.statistics.items() >= here.statistics.items():  # the run's also count training prompts
        return f"{line}: the same"
    ends = [measured.statistics.get(f"{figure}{end}") for measured in (here, run) for end in ("_low", "_high")]
    low, high, run_low, run_high = (math.nan if end is None else end for end in ends)
    if math.isnan(low + high + run_low + run_high):
        return f"{line}, {_drawn_again(temperature)}"
    overlap = low <= run_high and run_low <= high
    return f"{line}, {_drawn_again(temperature)}; the intervals {'overlap' if overlap else 'do not overlap'}"


def _drawn_again(temperature: float) -> str:
    """The difference between two measurements of one checkpoint with the same settings."""
    if temperature == 0:
        return "with the same most likely tokens but for rounding, which depends on how requests are batched"
    return f"from other random numbers at temperature {temperature:g}"


def summary_of_sets(first: Mapping[str, MeasuredSet], last: Mapping[str, MeasuredSet]) -> list[str]:
    """Sum up the first and the last measurement of each set, in a line each."""
    lines = []
    for name, end in last.items():
        begin, subject = first.get(name, end), end.subject if name == metrics.EVAL else f"{name}, {end.subject}"
        count = f", {end.prompts} prompts" if end.subject == _HELD_OUT_ACCURACY else ""
        value = _with_interval(end, end.measure)
        result = f"{subject}: {value}{count}, step {end.step}"
        if begin.step != end.step and (begin.identity, begin.measure) == (end.identity, end.measure):
            points = f" ({100 * (end.value - begin.value):+.1f} points)" if "accuracy" in end.measure else ""
            result = (
                f"{subject}: {_with_interval(begin, begin.measure)} -> {value}{points}{count}, step {begin.step} -> "
                f"step {end.step}"
            )
        elif begin.step != end.step:
            result += "; not compared with the first, which was measured otherwise"
        lines.append(result)
    return lines


def summary_of_best(best: Best | None) -> list[str]:
    """Name the best checkpoint in a line; no line if none is kept as such."""
    return [] if best is None else [f"best checkpoint: step {best.step}, {best.metric} {best.value:.4g}"]


def _with_interval(measured: MeasuredSet, figure: str) -> str:
    low, high = (measured.statistics.get(f"{figure}{end}") for end in ("_low", "_high"))
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{measured.statistics[figure]:.3f}{interval}"
