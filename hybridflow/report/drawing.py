"""Drawings of plots: coordinates of everything in them, which the template `plot.svg.jinja` writes.

A unit is a 72nd of an inch. Colours are left to the page: `var(--ink)`, `var(--rule)` or `var(--series-N)` of its CSS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridflow.report.plots import HEAT_CLASSES, BarPlot, HeatPlot, LanePlot, LinePlot, Plot
from hybridflow.report.run_data import Floats, finite

SERIES = 10
"""Number of colours; more lines repeat them, dashed."""

_WIDTH, _WIDE, _HEIGHT, _LANE_HEIGHT = 389.0, 806.0, 194.0, 17.0
_TOP, _RIGHT, _BOTTOM, _LEFT = 8.0, 12.0, 29.0, 10.0
"""Margins; the left one without the labels of the y axis, the top one without the legend."""
_CHARACTER, _LINE_HEIGHT = 5.2, 12.0
"""Mean width of a character of 9 units, and its height with the space between lines."""
_MARGIN = 0.05
"""Share of an axis that is left free on either side of the values."""
_FEW_POINTS = 60
"""Points of a line that has a dot at each, at most."""
_LANE, _BAR = 0.76, 0.86
"""Shares of a lane's height and of the distance of bars that are filled."""
_CELL_WIDTH, _CELL_HEIGHT, _CELLS_HEIGHT, _LEAST_CELL_HEIGHT = 40.0, 18.0, 260.0, 4.5
"""Width and height of a heat map's cell at most, height of all rows unless a cell would be lower than the last."""
_CELL_LABELS = 14
_HUGE = 1e250
"""Larger values are drawn as this one: the sums of limits and margins stay finite."""


@dataclass(frozen=True)
class Axes2D:
    """Position and scale of a drawing's axes.

    Args:
        box: left, top, right and bottom, in the units of the SVG's view box.
        xs, ys: values at the left and the right, at the bottom and the top.
        log: True if the y axis is logarithmic.
    """

    box: tuple[float, float, float, float]
    xs: tuple[float, float]
    ys: tuple[float, float]
    log: bool = False

    def x(self, values: Floats) -> Floats:
        """Return positions of values (n,) on the x axis."""
        left, _, right, _ = self.box
        return _interpolated(values, self.xs, (left, right))

    def y(self, values: Floats) -> Floats:
        """Return positions of values (n,) on the y axis: those beyond it at its ends, nan for what is not finite."""
        _, top, _, bottom = self.box
        values = np.where(np.isfinite(values), np.clip(values, min(self.ys), max(self.ys)), np.nan)
        if self.log:
            return _interpolated(np.log10(values), (math.log10(self.ys[0]), math.log10(self.ys[1])), (bottom, top))
        return _interpolated(values, self.ys, (bottom, top))


@dataclass(frozen=True)
class Tick:
    """A label of an axis, and its position."""

    at: float
    label: str


@dataclass(frozen=True)
class Shape:
    """A path of a drawing.

    Args:
        kind: its style in the template: "line", "dots", "band", "range", "bar", "total", "cells" or "cross".
        path: the attribute `d` of an SVG path.
        series: index of the line, layer, label or class.
        transform: of the path's coordinates; empty for none.
    """

    kind: str
    path: str
    series: int = 0
    transform: str = ""


@dataclass(frozen=True)
class LegendEntry:
    """The name of shapes.

    Args:
        kind, series: of the shapes.
        label: their name.
        x, y: position in a drawing.
    """

    kind: str
    series: int
    label: str
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Drawing:
    """A plot with the coordinates of all that is drawn.

    Args:
        plot: the plot.
        size: width and height.
        axes: its axes.
        x_ticks, y_ticks: of the axes.
        shapes: from the back to the front.
        legend: entries over the plot.
        cuts: totals of bars that are cut.
        has_columns, has_rows: True if there are grid lines at the ticks of the x axis, of the y axis.
    """

    plot: Plot
    size: tuple[float, float]
    axes: Axes2D
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    shapes: Sequence[Shape]
    legend: Sequence[LegendEntry] = ()
    cuts: Sequence[Tick] = ()
    has_columns: bool = True
    has_rows: bool = True


def draw(plot: Plot, *, legend: bool = False) -> Drawing:
    """Draw a plot.

    Args:
        plot: to draw.
        legend: True to name lines in the drawing. A page names them outside.
    """
    if isinstance(plot, LinePlot):
        return _draw_lines(plot, legend_of(plot) if legend else [])
    if isinstance(plot, BarPlot):
        return _draw_bars(plot)
    if isinstance(plot, HeatPlot):
        return _draw_cells(plot)
    assert isinstance(plot, LanePlot)
    return _draw_lanes(plot)


def legend_of(plot: LinePlot) -> list[LegendEntry]:
    """Return the names of the band and the lines of a plot, without positions."""
    bands = [LegendEntry("band", 0, plot.band.label)] if plot.band is not None else []
    return [*bands, *(LegendEntry("line", index, line.label) for index, line in enumerate(plot.lines))]


def _draw_lines(plot: LinePlot, legend: list[LegendEntry]) -> Drawing:
    xs = [line.x for line in plot.lines]
    lows = [line.y if line.low is None else line.low for line in plot.lines]
    highs = [line.y if line.high is None else line.high for line in plot.lines]
    if plot.from_zero and not plot.logarithmic and not any((line.y < 0).any() for line in plot.lines):
        y_limits = (0.0, 1.08 * _ends(highs)[1] or 1.0)
    elif plot.band is None:
        y_limits = _limits([*lows, *highs], plot.logarithmic)
    else:
        y_limits = _limits([*lows, *highs, plot.band.low, plot.band.high], plot.logarithmic)
    y_ticks = _log_ticks(*y_limits) if plot.logarithmic else _ticks(*y_limits, 8)
    x_limits = _limits(xs if plot.band is None else [*xs, plot.band.x])
    drawing = _blank(plot, x_limits, y_limits, {value: _number(value) for value in y_ticks}, legend)
    return replace(drawing, shapes=tuple(_line_shapes(plot, drawing.axes)))


def _line_shapes(plot: LinePlot, axes: Axes2D) -> Iterator[Shape]:
    if (band := plot.band) is not None:
        yield Shape("band", _area(axes.x(band.x), axes.y(band.low), axes.y(band.high)))
    for index, line in enumerate(plot.lines):
        x, y = axes.x(line.x), axes.y(line.y)
        if line.low is not None and line.high is not None:
            yield Shape("range", _area(x, axes.y(line.low), axes.y(line.high)), index)
        yield Shape("line", "".join(f"M{_points(x[run], y[run])}" for run in _runs(np.isfinite(y))), index)
        if len(x) <= _FEW_POINTS:
            points = zip(x[np.isfinite(y)], y[np.isfinite(y)], strict=True)
            yield Shape("dots", "".join(f"M{at:.2f} {value:.2f}h0" for at, value in points), index)


def _draw_bars(plot: BarPlot) -> Drawing:
    entries = [LegendEntry("bar", index, layer.label) for index, layer in enumerate(plot.layers)]
    x_limits = (float(plot.x[0] - 0.7 * plot.width), float(plot.x[-1] + 0.7 * plot.width))
    y_ticks = {value: _number(value) for value in _ticks(0.0, plot.limit, 8)}
    is_cut = sum((layer.values for layer in plot.layers), np.zeros_like(plot.x)) > plot.limit
    legend = [*entries, LegendEntry("total", 0, plot.total.label)]
    drawing = _blank(plot, x_limits, (0.0, plot.limit), y_ticks, legend, above=_LINE_HEIGHT if is_cut.any() else 0.0)
    axes, half = drawing.axes, _BAR / 2 * plot.width
    left, right = axes.x(plot.x - half), axes.x(plot.x + half)
    shapes, below = [], np.zeros_like(plot.x)
    for index, layer in enumerate(plot.layers):
        shapes.append(Shape("bar", _boxes(left, axes.y(below), right, axes.y(below + layer.values)), index))
        below = below + layer.values
    totals = zip(left, right, plot.total.values, axes.y(plot.total.values), strict=True)
    lines = (f"M{x:.2f} {y:.2f}H{end:.2f}" for x, end, total, y in totals if total <= plot.limit)
    shapes.append(Shape("total", "".join(lines)))
    cuts = zip(axes.x(plot.x)[is_cut], plot.total.values[is_cut], strict=True)
    return replace(
        drawing, shapes=shapes, cuts=[Tick(float(at), f"↑ {total:.3g}") for at, total in cuts], has_columns=False
    )


def _draw_lanes(plot: LanePlot) -> Drawing:
    names = [*plot.labels[: SERIES - 1], *(["others"] if len(plot.labels) >= SERIES else [])]
    series = {label: min(index, SERIES - 1) for index, label in enumerate(plot.labels)}
    corners: dict[int, list[tuple[float, float, float, float]]] = {}
    for lane, (_, bars) in enumerate(plot.lanes):
        for bar in bars:
            box = (bar.begin, lane + _LANE / 2, bar.end, lane - _LANE / 2)
            corners.setdefault(series[bar.label], []).append(box)
    drawing = _blank(
        plot,
        (0.0, max(bar.end for _, bars in plot.lanes for bar in bars)),
        (len(plot.lanes) - 0.5, -0.5),
        {float(lane): name for lane, (name, _) in enumerate(plot.lanes)},
        [LegendEntry("bar", index, names[index]) for index in sorted(corners)],
    )
    axes, shapes = drawing.axes, []
    for index, boxes in corners.items():
        left, bottom, right, top = np.asarray(boxes).T
        shapes.append(Shape("bar", _boxes(axes.x(left), axes.y(bottom), axes.x(right), axes.y(top)), index))
    return replace(drawing, shapes=shapes, has_rows=False)


def _draw_cells(plot: HeatPlot) -> Drawing:
    """Draw the cells of a class as horizontal strokes, in coordinates of rows and columns."""
    rows, columns = plot.values.shape
    legend = [LegendEntry("swatch", index, name) for index, name in enumerate(plot.classes)]
    if plot.zeros:
        legend.append(LegendEntry("cross", 0, plot.zeros))
    labels = {row: str(plot.rows[int(row)]) for row in _ticks(0.0, rows - 1.0, _CELL_LABELS, integer=True)}
    drawing = _blank(plot, (-0.5, columns - 0.5), (rows - 0.5, -0.5), labels, legend)
    left, top, right, bottom = drawing.axes.box
    width, height = (right - left) / columns, (bottom - top) / rows
    transform = f"translate({left:.2f} {top + height / 2:.2f}) scale({width:.4f} {height:.4f})"
    classes = np.searchsorted(np.asarray(plot.bounds), plot.values, side="right")
    is_crossed = (plot.values == 0) if plot.zeros else np.zeros_like(plot.values, dtype=bool)
    shapes = [
        Shape("cells", _strokes((classes == index) & ~is_crossed), index, transform) for index in range(HEAT_CLASSES)
    ]
    crosses = (f"M{column}.2 {row - 0.3:.1f}l.6 .6m0 -.6l-.6 .6" for row, column in np.argwhere(is_crossed).tolist())
    shapes.append(Shape("cross", "".join(crosses), 0, transform))
    return replace(drawing, shapes=[shape for shape in shapes if shape.path], has_columns=False, has_rows=False)


def _strokes(is_drawn: NDArray[np.bool_]) -> str:
    """Return a stroke for each run of neighbouring cells of a row."""
    runs = ((row, run) for row, cells in enumerate(is_drawn) for run in _runs(cells))
    return "".join(f"M{run.start} {row}h{run.stop - run.start}" for row, run in runs)


def _blank(
    plot: Plot,
    xs: tuple[float, float],
    ys: tuple[float, float],
    y_ticks: dict[float, str],
    legend: Sequence[LegendEntry],
    above: float = 0.0,
) -> Drawing:
    """Lay out the axes and the legend; `above` is left free between them."""
    width = _WIDE if plot.is_wide else _WIDTH
    left = _LEFT + (_LINE_HEIGHT if plot.y_label else 0.0) + _CHARACTER * max(map(len, y_ticks.values()), default=0)
    entries = list(_flow(legend, left, width))
    top = _TOP + above + (entries[-1].y + _LINE_HEIGHT / 2 if entries else 0.0)
    right, height = width - _RIGHT, _HEIGHT
    if isinstance(plot, LanePlot):
        height = 86.0 + _LANE_HEIGHT * len(plot.lanes)
    elif isinstance(plot, HeatPlot):
        rows, columns = plot.values.shape
        right = min(right, left + _CELL_WIDTH * columns)
        height = top + _BOTTOM + rows * min(_CELL_HEIGHT, max(_LEAST_CELL_HEIGHT, _CELLS_HEIGHT / rows))
    axes = Axes2D((left, top, right, height - _BOTTOM), xs, ys, isinstance(plot, LinePlot) and plot.logarithmic)
    x_values = _ticks(*xs, 12 if plot.is_wide else 8, integer="step" in plot.x_label or isinstance(plot, HeatPlot))
    return Drawing(
        plot,
        (width, height),
        axes,
        [Tick(float(at), _number(value)) for at, value in zip(axes.x(np.asarray(x_values)), x_values, strict=True)],
        [Tick(float(at), label) for at, label in zip(axes.y(np.asarray(list(y_ticks))), y_ticks.values(), strict=True)],
        (),
        entries,
    )


def _flow(entries: Sequence[LegendEntry], left: float, width: float) -> Iterator[LegendEntry]:
    """Place the entries of a legend in rows from the top."""
    x, y = left, _LINE_HEIGHT
    for entry in entries:
        length = 28.0 + _CHARACTER * 8 / 9 * len(entry.label)  # with its mark and a space
        if x > left and x + length > width:
            x, y = left, y + _LINE_HEIGHT
        yield replace(entry, x=x, y=y)
        x += length


def _ends(values: Sequence[Floats]) -> tuple[float, float]:
    """Return the lowest and the highest finite value; 0 and 0 if there is none."""
    numbers = np.clip(finite(np.concatenate(values)), -_HUGE, _HUGE)
    return (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 0.0)


def _limits(values: Sequence[Floats], log: bool = False) -> tuple[float, float]:
    """Return the limits of an axis: the lowest and the highest of the values with a margin."""
    if log:
        low, high = _limits(
            [np.log10(np.clip(numbers[numbers > 0], 1 / _HUGE, _HUGE)) for numbers in map(finite, values)]
        )
        return 10.0**low, 10.0**high
    low, high = _ends(values)
    size = max(abs(low), abs(high))
    spread = high - low if high - low > 1e-9 * size else size or 1.0
    margin = max(_MARGIN * spread, 1 / _HUGE)
    return low - margin, high + margin


def _ticks(low: float, high: float, most: int, integer: bool = False) -> list[float]:
    """Return the multiples of a round number between two limits, at most `most` and one more."""
    smallest = max((high - low) / most, 1.0 if integer else 0.0)
    power = 10.0 ** math.floor(math.log10(smallest))
    factors = (1, 2, 5) if integer and power == 1 else (1, 2, 2.5, 5)
    step = next((factor * power for factor in factors if factor * power >= smallest), 10 * power)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of 10 between two limits; on few decades, 2 and 5 times these as well."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    exponents = range(first, last + 1, math.ceil((last - first) / 8))
    return [value for exponent in exponents for factor in factors if low <= (value := factor * 10.0**exponent) <= high]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100_000 else f"{value:,.6g}"


def _interpolated(values: Floats, limits: tuple[float, float], ends: tuple[float, float]) -> Floats:
    return ends[0] + (values - limits[0]) / (limits[1] - limits[0]) * (ends[1] - ends[0])


def _runs(is_drawn: NDArray[np.bool_]) -> Iterator[slice]:
    """Yield the slices of neighbouring points that are drawn."""
    edges = np.flatnonzero(np.diff(is_drawn.astype(int), prepend=0, append=0))
    yield from map(slice, edges[::2].tolist(), edges[1::2].tolist())


def _points(x: Floats, y: Floats) -> str:
    return "L".join(f"{left:.2f} {top:.2f}" for left, top in zip(x.tolist(), y.tolist(), strict=True))


def _area(x: Floats, low: Floats, high: Floats) -> str:
    """Return the outline between two lines."""
    runs = _runs(np.isfinite(low) & np.isfinite(high))
    return "".join(f"M{_points(x[run], high[run])}L{_points(x[run][::-1], low[run][::-1])}Z" for run in runs)


def _boxes(left: Floats, bottom: Floats, right: Floats, top: Floats) -> str:
    """Return the outlines of rectangles."""
    corners = zip(left.tolist(), bottom.tolist(), right.tolist(), top.tolist(), strict=True)
    return "".join(f"M{x:.2f} {y:.2f}H{end:.2f}V{up:.2f}H{x:.2f}Z" for x, y, end, up in corners)
