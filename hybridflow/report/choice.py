"""Sections of a page: the plots of the metrics that a run logged, and the metrics that get none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hybridflow.report.catalogue import EXPERTS, GENERATION, LEARNING, OPTIMISATION, SPEED, MetricPlot, in_words
from hybridflow.report.expert_loads import expert_load_plots
from hybridflow.report.held_out_sets import set_plots
from hybridflow.report.over_time import device_plots, step_time_plots, timeline_plots
from hybridflow.report.plots import Band, Line, LinePlot, Plot, bucketed, is_long, spans_decades
from hybridflow.report.run_data import Floats, RunData, Series, finite
from hybridflow.report.tables import Cell, Table

_SCALE_RATIO = 8.0
"""Metrics whose values differ by more would be flat lines on one axis."""
_FLAT = 1e-9
"""Share of the size of values: smaller differences are rounding."""
_VISIBLE = 0.004
"""Width of a line as a share of the plot's height."""


@dataclass(frozen=True)
class Section:
    """Plots under one heading."""

    title: str
    plots: tuple[Plot, ...]


def sections(run: RunData, steps: tuple[int, int] | None = None) -> tuple[Section, ...]:
    """Return every plot of a run that is not flat, under headings.

    Args:
        run: to draw.
        steps: whose loads of experts are drawn; the first and the last if None.
    """
    plots: dict[str, Iterable[Plot]] = {
        "Learning": _plots(run, LEARNING),
        "Held-out sets": set_plots(run),
        "Optimisation": _plots(run, OPTIMISATION),
        "Experts": (*_plots(run, EXPERTS), *expert_load_plots(run, steps)),
        "Generation": _plots(run, GENERATION),
        "Speed and memory": (*step_time_plots(run), *_plots(run, SPEED)),
        "Devices": device_plots(run.samples),
        "Timeline": timeline_plots(run.spans),
    }
    kept = ((title, tuple(filter(_is_informative, of_title))) for title, of_title in plots.items())
    return tuple(Section(title, of_title) for title, of_title in kept if of_title)


def unplotted(run: RunData) -> Table | None:
    """Tabulate the metrics whose lines would be flat, a point or empty: last finite value, number of steps."""
    rows: dict[str, tuple[Cell, ...]] = {}
    for entry in (*LEARNING, *OPTIMISATION, *EXPERTS, *GENERATION, *SPEED):
        logged = _matching(run, entry)
        for name in [name for name in logged if name not in _varying(logged)]:
            values = finite(logged[name].values)
            value = f"{values[-1]:.6g}" if len(values) else "not finite"
            rows[name] = (Cell(in_words(name)), Cell(name, "code"), Cell(value), Cell(f"{len(logged[name].values):,}"))
    return Table(("", "metric", "value", "steps"), tuple(rows.values())) if rows else None


def _varying(logged: dict[str, Series]) -> dict[str, Series]:
    """Return the lines of a plot that are not 0 throughout or never finite; none if no line varies."""
    if not any(_varies(series.values) for series in logged.values()):
        return {}
    return {name: series for name, series in logged.items() if finite(series.values).any()}


def _varies(values: Floats) -> bool:
    """True if a line through the values is more than a point, and not flat."""
    kept = finite(values)
    return len(kept) > 1 and float(np.ptp(kept)) > _FLAT * float(np.abs(kept).max())


def _is_informative(plot: Plot) -> bool:
    return not isinstance(plot, LinePlot) or any(_varies(line.y) for line in plot.lines)


def _plots(run: RunData, entries: Iterable[MetricPlot]) -> Iterator[Plot]:
    for entry in entries:
        series = _varying(_matching(run, entry))
        series, equal = (series, {}) if entry.band else _without_equals(series)
        for number, group in enumerate(_by_scale(series) if entry.split_scales else [series] if series else []):
            plot = _line_plot(run, entry, group)
            note = " ".join(filter(None, [plot.note, *(equal[name] for name in group if name in equal)]))
            if number:
                plot = replace(plot, name=f"{plot.name}-{number + 1}", title=f"{plot.title}: {', '.join(group)}")
            yield replace(plot, note=note)


def _matching(run: RunData, entry: MetricPlot) -> dict[str, Series]:
    """Return the logged metrics of a plot, in the order of its expressions."""
    logged = run.phases[entry.phase].series if entry.phase in run.phases else {}
    names = [name for pattern in entry.metrics for name in logged if re.fullmatch(pattern, name)]
    # Older runs on CPUs called their hosts' memory that of a GPU.
    return {name: logged[name] for name in dict.fromkeys(names) if not (run.on_cpus and "_gpu_" in name)}


def _without_equals(logged: dict[str, Series]) -> tuple[dict[str, Series], dict[str, str]]:
    """Leave out metrics that another would hide; the note about them stands under the name of that other."""
    kept: dict[str, Series] = {}
    notes: dict[str, str] = {}
    for name, series in logged.items():
        twin = next((other for other, shown in kept.items() if _is_equal(shown, series)), None)
        if twin is None:
            kept[name] = series
        else:
            notes[twin] = " ".join(filter(None, [notes.get(twin), f"{name} is nearly the same."]))
    return kept, notes


def _is_equal(one: Series, other: Series) -> bool:
    """True if nobody could tell their lines apart."""
    if not np.array_equal(one.steps, other.steps):
        return False
    both = finite(np.concatenate([one.values, other.values]))
    visible = _VISIBLE * float(np.ptp(both)) if len(both) else 0.0
    return bool(np.allclose(one.values, other.values, rtol=1e-5, atol=visible, equal_nan=True))


def _by_scale(logged: dict[str, Series]) -> list[dict[str, Series]]:
    """Group the metrics whose values are of one order of magnitude, in the order of their first ones."""
    groups: list[dict[str, Series]] = []
    for name, series in logged.items():
        size = _size(series)
        for group in groups:
            sizes = [size, *map(_size, group.values())]
            if max(sizes) <= _SCALE_RATIO * min(sizes):
                group[name] = series
                break
        else:
            groups.append({name: series})
    return groups


def _size(series: Series) -> float:
    """Return a high quantile of the magnitudes: values of a first step may be far from all others."""
    values = np.abs(finite(series.values))
    return float(np.quantile(values, 0.9)) if len(values) else 0.0


def _line_plot(run: RunData, entry: MetricPlot, logged: dict[str, Series]) -> LinePlot:
    terms = [name for name in logged if name.count("/") > 1]
    if len(terms) == 1 and len(logged) > 1:
        del logged[terms[0]]  # the sum of one term
    lines = tuple(Line.of(name, series.steps, series.values) for name, series in logged.items())
    return LinePlot(
        name=entry.name,
        title=entry.title,
        y_label=entry.y_label,
        x_label="step of the warm-up" if entry.phase == "sft" else "step",
        note=" ".join(filter(None, (_thinned(lines), _gaps(logged.values())))),
        lines=lines,
        band=_band(run, next(iter(logged))) if entry.band else None,
        logarithmic=entry.may_be_logarithmic and spans_decades(lines),
        from_zero=entry.from_zero,
    )


def _band(run: RunData, mean: str) -> Band | None:
    """Return one standard deviation around `<group>/mean`; None if they were logged at different steps."""
    values, deviation = run.series(mean), run.series(mean.removesuffix("mean") + "std")
    if values is None or deviation is None or not np.array_equal(values.steps, deviation.steps):
        return None
    steps, low, high = values.steps, values.values - deviation.values, values.values + deviation.values
    if is_long(steps):
        lows, highs = bucketed(steps, low), bucketed(steps, high)
        steps, low, high = lows.x, lows.mean, highs.mean
    return Band("mean ± standard deviation of the samples", steps, low, high)


def _thinned(lines: Iterable[Line]) -> str:
    some = any(line.low is not None for line in lines)
    return "A line is the mean of neighbouring steps, between the lowest and the highest of them." if some else ""


def _gaps(logged: Iterable[Series]) -> str:
    missing = sum(int((~np.isfinite(series.values)).sum()) for series in logged)
    return f"{missing:,} {'value is' if missing == 1 else 'values are'} not finite and not shown." if missing else ""
