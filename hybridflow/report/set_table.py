"""The table of held-out sets: the first, the best and the last value of each figure, with intervals."""

from __future__ import annotations

from html import escape

import numpy as np

from hybridflow.report.run_data import RunData
from hybridflow.report.set_figures import SetFigure, prompts_of, sets_of

_COLUMNS = ("set", "prompts", "figure", "first", "highest", "last")


def set_table(run: RunData) -> str:
    """As HTML; empty where no named set was measured."""
    sets = sets_of(run)
    if not sets:
        return ""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "\n".join(
        _row(name if not place else "", f"{prompts_of(run, name):,}" if not place else "", figure)
        for name, figures in sets.items()
        for place, figure in enumerate(figures.values())
    )
    return (
        "<h2>Evaluation</h2>\n<p>With 95 % confidence intervals over prompts.</p>\n"
        f'<div class="samples"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n'
    )


def _row(name: str, prompts: str, figure: SetFigure) -> str:
    values = figure.series.values
    finite = np.where(np.isfinite(values), values, -np.inf)
    shown = [_value(figure, place) for place in (0, int(finite.argmax()), len(values) - 1)]
    return "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in (name, prompts, figure.name, *shown)) + "</tr>"


def _value(figure: SetFigure, place: int) -> str:
    step, value = float(figure.series.steps[place]), float(figure.series.values[place])
    low, high = figure.low.get(step), figure.high.get(step)
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{value:.3f}{interval} (step {step:.0f})"
