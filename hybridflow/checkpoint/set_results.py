"""Measurements of a run's held-out sets, and the best checkpoint by one of their figures."""

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

from engine3d.checkpoint.inspect import DRIVER
from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, read_json_object
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import ACCURACY, PREFERENCE, REWARD, SCORE, Measure
from hybridflow.rundir.atomic_files import replace_file

if TYPE_CHECKING:
    from hybridflow.config.evaluation import PlannedSet
    from hybridflow.config.recipe import Recipe
    from hybridflow.config.run import BestConfig
    from hybridflow.data.prompts import Prompts

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
        prompts: that have a response in the figures.
        samples: responses to each that were asked for.
        figures: values and ends of intervals, by the names of `evaluation_statistics`.
    """

    identity: str
    measure: Measure
    step: int
    prompts: int
    samples: int
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The figure that sums it up."""
        return self.figures[self.measure]

    @property
    def subject(self) -> str:
        """The figure and its prompts, in words."""
        learned = int(self.figures.get(metrics.SET_TRAINING, 0))
        if self.measure == ACCURACY and not learned:
            return _HELD_OUT_ACCURACY
        kind = {0: "held-out ", self.prompts: "training "}.get(learned, "")
        some = "" if kind else f" ({learned} of them training prompts)"
        what, of = _WORDS[self.measure]
        return f"{what} of {self.prompts} {kind}{of}{some}"

    def metrics(self, name: str) -> dict[str, float]:
        """The figures by the names of their metrics, for the set of this name."""
        return {metrics.of_set(name, figure): value for figure, value in self.figures.items()}


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


def set_identity(recipe: Recipe, planned: PlannedSet, prompts: Prompts) -> str:
    """Identify all that the figures of a set depend on beside the weights.

    Args:
        recipe: of the run.
        planned: the set.
        prompts: of it.
    """
    from hybridflow.config.judge_identity import asked_judge_identity  # imports torch

    rewards: list[Any] = []
    if planned.pairs:
        rewards = [recipe.algorithm.name]
    elif planned.reward is not None:
        functions = planned.reward.functions
        rewards = [(each.name, each.path, each.weight, each.arguments) for each in functions]
        rewards += asked_judge_identity(functions, recipe.judge)
    elif (model := recipe.scoring.get("reward")) is not None:
        rewards = [str(model.path.absolute())]
    answers = [example.answer for example in prompts.examples]
    sampling, settings = planned.sampling.model_dump(mode="json"), planned.settings
    hashes = [int(each) for each in prompts.text_hashes()]
    facts = json.dumps([hashes, answers, rewards, sampling, settings.samples, settings.passing], default=str)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def learned_from(prompts: Prompts, phases: Sequence[Prompts]) -> int:
    """How many prompts of a set are among those that the model learns from.

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
    if measured is None or measured.step != step or not math.isfinite(measured.figures.get(figure, math.nan)):
        return before
    here = Best(settings.metric, step, measured.figures[figure], measured.identity)
    if before is None or before.identity != here.identity or settings.is_better(here.value, before.value):
        return here
    return before


def write_results(checkpoint: Path, last_measured: Mapping[str, MeasuredSet], best: Best | None) -> None:
    """Add to a whole checkpoint what the evaluation of its step has measured, which was due when it was saved.

    Raises:
        OSError: it cannot be written.
    """
    facts = {
        "last_measured": {name: dataclasses.asdict(each) for name, each in last_measured.items()},
        "best": dataclasses.asdict(best) if best is not None else None,
    }
    replace_file(checkpoint / RESULTS, json.dumps(facts, indent=1) + "\n")


def _driver_facts(checkpoint: Path) -> dict[str, Any]:
    """The driver's state of a checkpoint, with what was measured later; nothing of a checkpoint of weights alone."""
    path, results = checkpoint / DRIVER, checkpoint / RESULTS
    facts = read_json_object(path, MOST_LIST_BYTES) if path.exists() else {}
    if facts.get("evaluation_due") and results.exists():
        facts |= read_json_object(results, MOST_LIST_BYTES)
    return facts


def read_best(checkpoint: Path) -> Best | None:
    """The best checkpoint of a run once the given one was whole; None where none was kept as such.

    Raises:
        UserError: its driver's state cannot be read.
    """
    found = _driver_facts(checkpoint).get("best")
    try:
        return None if found is None else Best(**found)
    except TypeError:
        raise UserError(f"{checkpoint / DRIVER}: best is {found!r}, expected what a run writes") from None


def measured_at(checkpoint: Path) -> dict[str, MeasuredSet]:
    """The run's measurements at the step of a checkpoint, by set; none of a checkpoint of weights alone.

    Raises:
        UserError: the driver's state cannot be read.
    """
    facts = _driver_facts(checkpoint)
    try:
        found = {name: MeasuredSet(**each) for name, each in facts.get("last_measured", {}).items()}
    except (TypeError, AttributeError):
        raise UserError(f"{checkpoint / DRIVER}: last_measured is damaged, expected what a run writes") from None
    return {name: each for name, each in found.items() if each.step == facts["step"]}


def value_of(checkpoint: Path, metric: str) -> float | None:
    """A metric of a set that was measured at the step of a checkpoint; None where it was not."""
    found = metrics.set_of(metric)
    measured = measured_at(checkpoint).get(found[0]) if found is not None else None
    return measured.figures.get(found[1]) if found is not None and measured is not None else None


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
    if run.figures.items() >= here.figures.items():  # the run's also count training prompts
        return f"{line}: the same"
    ends = [each.figures.get(f"{figure}{end}") for each in (here, run) for end in ("_low", "_high")]
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
        whole = f"{subject}: {value}{count}, step {end.step}"
        if begin.step != end.step and (begin.identity, begin.measure) == (end.identity, end.measure):
            points = f" ({100 * (end.value - begin.value):+.1f} points)" if "accuracy" in end.measure else ""
            whole = (
                f"{subject}: {_with_interval(begin, begin.measure)} -> {value}{points}{count}, step {begin.step} -> "
                f"step {end.step}"
            )
        elif begin.step != end.step:
            whole += "; not compared with the first, which was measured otherwise"
        lines.append(whole)
    return lines


def summary_of_best(best: Best | None) -> list[str]:
    """Which checkpoint is the best, in a line; nothing where none is kept as such."""
    return [] if best is None else [f"best checkpoint: step {best.step}, {best.metric} {best.value:.4g}"]


def _with_interval(measured: MeasuredSet, figure: str) -> str:
    low, high = (measured.figures.get(f"{figure}{end}") for end in ("_low", "_high"))
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{measured.figures[figure]:.3f}{interval}"
