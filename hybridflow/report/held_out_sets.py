"""Held-out sets: their metrics, their curves, their table, and responses to them side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine3d.errors import UserError
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import HIGH, LOW, PREFERENCE, REWARD, SCORE
from hybridflow.report.plots import Line, LinePlot, is_long
from hybridflow.report.run_data import RunData, Series
from hybridflow.report.tables import Cell, Table, text_cell
from hybridflow.rundir.samples.evaluation_texts import EvaluationText, read_texts, steps_with_texts, text_file

_REWARDS = (REWARD, SCORE)
"""Metrics of a set that are no shares."""
_SHARE = re.compile(r"(?:mean|pass|maj)@(\d+)")
_NOTE = "The areas are 95 % confidence intervals over prompts."
_COLUMNS = ("set", "prompts", "figure", "first", "highest", "last")


@dataclass(frozen=True)
class SetMetric:
    """One metric of a set over its measurements.

    Args:
        name: such as "pass@4".
        series: its values.
        low, high: ends of the confidence intervals by step; empty if there are none.
    """

    name: str
    series: Series
    low: Mapping[float, float]
    high: Mapping[float, float]


def set_plots(run: RunData) -> Iterator[LinePlot]:
    """Plot the shares of each set: `mean@k`, `pass@k`, `maj@k`."""
    for name, by_metric in _sets(run).items():
        lines = tuple(_line(metric) for metric in by_metric if metric.name not in _REWARDS)
        if lines:
            has_areas = any(line.low is not None for line in lines) and not any(is_long(line.x) for line in lines)
            yield LinePlot(
                name=f"evaluation-{name}",
                title=f"Held-out set {name}",
                y_label="share",
                note=_NOTE if has_areas else "",
                lines=lines,
                from_zero=True,
            )


def set_table(run: RunData) -> Table | None:
    """Tabulate the first, the highest and the last value of each metric; None if no set was measured."""
    rows = []
    for name, by_metric in _sets(run).items():
        measured = run.series(metrics.of_set(name, metrics.SET_PROMPTS), "eval")
        heads = (name, f"{int(measured.values[-1]):,}" if measured is not None else "0")
        for metric in by_metric:
            values = metric.series.values
            highest = int(np.where(np.isfinite(values), values, -np.inf).argmax())
            shown = [_value(metric, index) for index in (0, highest, len(values) - 1)]
            rows.append(tuple(map(Cell, (*heads, metric.name, *shown))))
            heads = ("", "")
    return Table(_COLUMNS, tuple(rows)) if rows else None


def responses_side_by_side(run: RunData, steps: tuple[int, int] | None = None) -> tuple[Table, ...]:
    """Tabulate responses to held-out prompts after two steps: a table for each set that has texts.

    Args:
        run: with the directory of the texts.
        steps: the two; the first and the last of each set if None.

    Raises:
        UserError: no set has texts of one of these steps, unless there are none at all but loads of experts; or a file
            cannot be read.
    """
    known = steps_with_texts(run.evaluations) if run.evaluations is not None else {}
    every = sorted({step for steps_of_set in known.values() for step in steps_of_set})
    for step in steps or ():
        if step not in every and (every or not run.expert_loads):
            raise UserError(f"report: no texts of held-out sets of step {step}; there are those of steps {every}")
    tables = []
    for name, steps_of_set in known.items():
        chosen = dict.fromkeys(step for step in (steps or (steps_of_set[0], steps_of_set[-1])) if step in steps_of_set)
        assert run.evaluations is not None
        if chosen:
            tables.append(_responses(run.evaluations, name, list(chosen)))
    return tuple(tables)


def _sets(run: RunData) -> dict[str, list[SetMetric]]:
    """Return the metrics of each set: mean reward or preference accuracy, `mean@k`, largest `pass@j`, and `maj@k`."""
    logged = run.phases["eval"].series if "eval" in run.phases else {}
    sets: dict[str, list[SetMetric]] = {}
    for name, series in logged.items():
        of, figure = metrics.set_of(name) or ("", "")
        if figure in (*_REWARDS, PREFERENCE) or _SHARE.fullmatch(figure):
            metric = SetMetric(figure, series, _ends(logged, name, LOW), _ends(logged, name, HIGH))
            sets.setdefault(of, []).append(metric)
    return {name: _without_smaller_passes(of_set) for name, of_set in sets.items()}


def _ends(logged: Mapping[str, Series], name: str, end: str) -> dict[float, float]:
    series = logged.get(f"{name}{end}")
    return {} if series is None else dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def _without_smaller_passes(of_set: list[SetMetric]) -> list[SetMetric]:
    """Leave out `pass@j` of smaller j, and `pass@1`, which is `mean@k`."""
    largest = max((int(metric.name[5:]) for metric in of_set if metric.name.startswith("pass@")), default=0)
    kept = f"pass@{largest}" if largest > 1 else ""
    return [metric for metric in of_set if not metric.name.startswith("pass@") or metric.name == kept]


def _line(metric: SetMetric) -> Line:
    steps, values = metric.series.steps, metric.series.values
    if is_long(steps) or not metric.low:
        return Line.of(metric.name, steps, values)
    low, high = (np.asarray([ends.get(step, np.nan) for step in steps.tolist()]) for ends in (metric.low, metric.high))
    return Line(metric.name, steps, values, low, high)


def _value(metric: SetMetric, index: int) -> str:
    step, value = float(metric.series.steps[index]), float(metric.series.values[index])
    low, high = metric.low.get(step), metric.high.get(step)
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{value:.3f}{interval} (step {step:.0f})"


def _responses(directory: Path, name: str, steps: list[int]) -> Table:
    by_step = {step: {text.index: text for text in read_texts(text_file(directory, name, step))} for step in steps}
    prompts = {index: text for step in reversed(steps) for index, text in by_step[step].items()}
    return Table(
        columns=(f"set {name}: prompt", "answer", *(f"step {step}" for step in steps)),
        rows=tuple(
            (text_cell(text.prompt), text_cell(text.answer), *(_response(by_step[step].get(index)) for step in steps))
            for index, text in sorted(prompts.items())
        ),
    )


def _response(text: EvaluationText | None) -> Cell:
    """Show the first response, with its reward and how many of all responses to the prompt pass."""
    if text is None:
        return text_cell("")
    reward = "no reward" if text.reward is None else f"reward {text.reward:.4g}"
    return text_cell(text.response, note=f"{reward}; {text.passing} of {text.scored} pass")
