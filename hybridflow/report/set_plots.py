"""A curve for each held-out set, with the intervals of its figures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridflow.metrics.evaluation_statistics import REWARD
from hybridflow.report.plots import Line, LinePlot
from hybridflow.report.run_data import RunData
from hybridflow.report.set_figures import SetFigure, sets_of
from hybridflow.report.thinning import is_long

_NOTE = "The areas are 95 % confidence intervals over prompts."


def set_plots(run: RunData) -> Iterator[LinePlot]:
    """One for the shares of each set: `mean@k`, `pass@k`, `maj@k`."""
    for name, figures in sets_of(run).items():
        shares = [each for figure, each in figures.items() if figure != REWARD]
        lines = tuple(map(_line, shares))
        if lines:
            areas = any(line.low is not None for line in lines) and not any(is_long(line.x) for line in lines)
            yield LinePlot(
                name=f"evaluation-{name}",
                title=f"Held-out set {name}",
                y_label="share",
                note=_NOTE if areas else "",
                lines=lines,
                from_zero=True,
            )


def _line(figure: SetFigure) -> Line:
    steps, values = figure.series.steps, figure.series.values
    if is_long(steps) or not figure.low:
        return Line.of(figure.name, steps, values)
    low, high = (np.asarray([ends.get(step, np.nan) for step in steps.tolist()]) for ends in (figure.low, figure.high))
    return Line(figure.name, steps, values, low, high)
