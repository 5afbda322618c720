"""Plots as SVG, by Matplotlib.

Colours are left to the page, so that a plot follows it from light to dark: every colour in the SVG is a variable of its
CSS, `var(--ink)`, `var(--rule)` or `var(--series-N)`.
"""

from __future__ import annotations

import io
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridflow.report.plots import BarPlot, LanePlot, LinePlot, Plot
from hybridflow.report.run_data import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = 10
"""How many colours there are; more lines begin again, dashed."""

_HEIGHT, _WIDTH, _WIDE = 2.7, 5.4, 11.2
_FEW_POINTS = 60
_COLUMNS, _NAMED_LINES = 7, 2
"""Columns of the legends of bars, and of lines."""
_LINE = "-line-"
"""Separator of the name of a plot and the number of a line in the line's identifier."""
_POINTS = 72
"""An inch in an SVG."""
_DASHES = ("-", "--", ":", "-.")
# Colours that stand for the variables: Matplotlib knows no others.
_INK, _RULE = "#010100", "#010101"
_VARIABLES = {_INK: "--ink", _RULE: "--rule"} | {f"#0102{n:02x}": f"--series-{n}" for n in range(SERIES)}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _RULE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,
    "grid.color": _RULE,
    "grid.linewidth": 0.5,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}


@dataclass(frozen=True)
class Axes2D:
    """The place and scale of a drawing's axes.

    Args:
        box: left, top, right and bottom, in the units of the SVG's view box.
        xs, ys: lower and upper limit.
        log: True if the y axis is logarithmic.
    """

    box: tuple[float, float, float, float]
    xs: tuple[float, float]
    ys: tuple[float, float]
    log: bool


@dataclass(frozen=True)
class Drawing:
    """An `<svg>` element that takes the width it is given, and its axes."""

    svg: str
    axes: Axes2D


def draw(plot: Plot, *, legend: bool = False) -> Drawing:
    """Draw a plot.

    Args:
        plot: what is drawn.
        legend: name the lines in the drawing. A page does it itself.
    """
    import matplotlib
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # tells of fonts
    # Identifiers in the SVG depend on the salt: those of two plots on one page must differ.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(_WIDE if plot.is_wide else _WIDTH, _height(plot)), layout="constrained")
        axes = figure.add_subplot()
        match plot:
            case LinePlot():
                _draw_lines(axes, plot)
            case BarPlot():
                _draw_bars(axes, plot)
            case LanePlot():
                _draw_lanes(axes, plot)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        if legend and isinstance(plot, LinePlot):
            _legend(axes, *axes.get_legend_handles_labels(), columns=_NAMED_LINES)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata=_NO_METADATA)
        width, height = (_POINTS * size for size in figure.get_size_inches())
        place = axes.get_position()
        box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
        return Drawing(
            _for_page(svg.getvalue()), Axes2D(box, axes.get_xlim(), axes.get_ylim(), axes.get_yscale() == "log")
        )


def _height(plot: Plot) -> float:
    """In inches."""
    return 1.2 + 0.24 * len(plot.lanes) if isinstance(plot, LanePlot) else _HEIGHT


def _colour(number: int) -> str:
    return f"#0102{number % SERIES:02x}"


def _draw_lines(axes: Axes, plot: LinePlot) -> None:
    from matplotlib.ticker import MaxNLocator

    if plot.band is not None:
        band = plot.band
        axes.fill_between(band.x, band.low, band.high, color=_colour(0), alpha=0.18, linewidth=0, label=band.label)
    for number, line in enumerate(plot.lines):
        few = len(line.x) <= _FEW_POINTS
        dashes = _DASHES[number // SERIES % len(_DASHES)]
        marks: dict[str, Any] = {"marker": "o", "markersize": 2.5, "markeredgewidth": 0} if few else {}
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=_colour(number), alpha=0.3, linewidth=0)
        name = f"{plot.name}{_LINE}{number}"
        axes.plot(line.x, line.y, dashes, color=_colour(number), label=line.label, gid=name, **marks)
    if plot.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(_number)
        values = [value for line in plot.lines for value in finite(line.y if line.high is None else line.high)]
        if plot.from_zero and not any(bool((line.y < 0).any()) for line in plot.lines):
            axes.set_ylim(0.0, 1.08 * max(values, default=0.0) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer="step" in plot.x_label))
    axes.xaxis.set_major_formatter(_number)


def _number(value: float, _position: float) -> str:
    """A tick's label, without the factor over the axis that Matplotlib would make of small numbers."""
    return f"{value:,.0f}" if abs(value) >= 100_000 else f"{value:,.6g}"


def _draw_bars(axes: Axes, plot: BarPlot) -> None:
    from matplotlib.ticker import MaxNLocator

    bottom = plot.total.values * 0
    for number, part in enumerate(plot.parts):
        axes.bar(plot.x, part.values, 0.86 * plot.width, bottom=bottom, color=_colour(number), label=part.label)
        bottom = bottom + part.values
    handles, labels = axes.get_legend_handles_labels()
    half = 0.43 * plot.width
    across = axes.hlines(plot.total.values, plot.x - half, plot.x + half, colors=_INK, linewidth=1.0)
    axes.set_ylim(0, plot.limit)
    axes.set_xlim(plot.x[0] - 0.7 * plot.width, plot.x[-1] + 0.7 * plot.width)
    cut = [(x, whole) for x, whole, top in zip(plot.x, plot.total.values, bottom, strict=True) if top > plot.limit]
    for x, whole in cut:
        axes.annotate(f"↑ {whole:.3g}", (x, plot.limit), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.xaxis.set_major_formatter(_number)
    axes.yaxis.set_major_formatter(_number)
    axes.grid(visible=False, axis="x")
    _legend(axes, [*handles, across], [*labels, plot.total.label], above=1.07 if cut else 1.0)


def _draw_lanes(axes: Axes, plot: LanePlot) -> None:
    numbers = {label: number for number, label in enumerate(plot.labels)}
    shown = plot.labels[: SERIES - 1]
    for label in plot.labels:
        number = min(numbers[label], SERIES - 1)
        name = label if label in shown else ("others" if number == numbers[label] else "")
        for lane, (_, bars) in enumerate(plot.lanes):
            of_label = [(bar.begin, bar.end - bar.begin) for bar in bars if bar.label == label]
            if of_label:
                axes.broken_barh(of_label, (lane - 0.38, 0.76), facecolors=_colour(number), linewidth=0, label=name)
                name = ""
    axes.set_yticks(range(len(plot.lanes)), [name for name, _ in plot.lanes])
    axes.set_ylim(len(plot.lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(bar.end for _, bars in plot.lanes for bar in bars))
    axes.grid(visible=False, axis="y")
    _legend(axes, *axes.get_legend_handles_labels())


def _legend(axes: Axes, handles: list[Any], labels: list[Any], *, above: float = 1.0, columns: int = _COLUMNS) -> None:
    """Over the plot, where it hides nothing."""
    axes.legend(
        handles,
        labels,
        ncols=min(columns, len(labels)),
        loc="lower left",
        bbox_to_anchor=(0.0, above),
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _for_page(svg: str) -> str:
    """Without what only a file of its own needs, of any width, and in the page's colours."""
    svg = svg[svg.index("<svg") :]
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', rest))
    names = {name for pair in used for name in pair}
    rest = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in names or _LINE in found[1] else "", rest)
    rest = re.sub(r"<!--.*?-->\s*", "", rest, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        rest = rest.replace(colour, f"var({variable})")
    return f"{head}>{rest}".strip()
