"""Drawings: axes, ticks, and the paths of lines, areas and bars."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridflow.cli.main import main
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.logger import Metrics
from hybridflow.report.drawing import SERIES, Drawing, draw
from hybridflow.report.page import svg
from hybridflow.report.plots import Band, Bar, BarPlot, LanePlot, Layer, Line, LinePlot


def _arange(*bounds: float) -> NDArray[np.float64]:
    return np.arange(*bounds, dtype=np.float64)


def line_plot(*values: float, **more: Any) -> LinePlot:
    line = Line("<line>", _arange(1.0, len(values) + 1), np.asarray(values))
    return LinePlot(**{"name": "a", "title": "A", "y_label": "<unit>", "lines": (line,)} | more)


def paths(drawing: Drawing, kind: str) -> list[str]:
    return [shape.path for shape in drawing.shapes if shape.kind == kind]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([\d.-]+)", path)]


def labels(drawing: Drawing) -> tuple[list[str], list[str]]:
    return [tick.label for tick in drawing.x_ticks], [tick.label for tick in drawing.y_ticks]


def test_values_lie_where_the_ticks_say() -> None:
    drawing = draw(line_plot(0.0, 5.0, 10.0))
    assert labels(drawing) == (["1", "2", "3"], ["0", "2", "4", "6", "8", "10"])
    [path] = paths(drawing, "line")
    (x, bottom), _, (last, top) = points(path)
    ticks = {tick.label: tick.at for tick in drawing.y_ticks}
    assert (bottom, top) == (pytest.approx(ticks["0"], abs=0.01), pytest.approx(ticks["10"], abs=0.01))
    assert [x, last] == pytest.approx([drawing.x_ticks[0].at, drawing.x_ticks[-1].at], abs=0.01)
    left, upper, right, lower = drawing.axes.box
    assert left < x < last < right and upper < top < bottom < lower


def test_powers_of_ten_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    drawing = draw(line_plot(1e-4, 1e-1, 1e2, logarithmic=True))
    assert labels(drawing)[1] == ["0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]
    assert np.ptp(np.diff([tick.at for tick in drawing.y_ticks])) == pytest.approx(0, abs=1e-9)
    (_, bottom), (_, middle), (_, top) = points(paths(drawing, "line")[0])
    assert middle == pytest.approx((bottom + top) / 2, abs=0.02)
    assert labels(draw(line_plot(0.03, 2.0, logarithmic=True)))[1] == ["0.05", "0.1", "0.2", "0.5", "1", "2"]


def test_steps_have_whole_numbers() -> None:
    assert labels(draw(line_plot(0.0, 1.0)))[0] == ["1", "2"]
    long = draw(line_plot(*range(1500)))
    assert labels(long)[0] == ["0", "250", "500", "750", "1,000", "1,250", "1,500"]
    assert not paths(long, "dots")


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [(1e308, -1e308), (5e-324, 1e-323), (1e-320, 1.0), (3.0, 3.0 + 1e-9), (-1e6, -1e6), (0.0, 0.0)]
)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_any_numbers_can_be_drawn(values: tuple[float, ...], logarithmic: bool) -> None:
    if logarithmic and min(values) <= 0:
        return
    drawing = draw(line_plot(*values, logarithmic=logarithmic))
    assert len(drawing.y_ticks) < 12
    assert all(map(math.isfinite, (*drawing.axes.xs, *drawing.axes.ys)))
    assert "nan" not in svg(drawing) and "inf" not in svg(drawing)


def test_what_is_not_finite_is_a_gap() -> None:
    values, low = np.asarray([1, 2, math.nan, math.inf, 3, 4.0]), np.asarray([0, math.nan, 0, 0, 0, 0])
    drawing = draw(line_plot(lines=(Line("a", _arange(6.0), values, low, np.full(6, 9.0)),)))
    [path], [dots], [area] = (paths(drawing, kind) for kind in ("line", "dots", "range"))
    assert path.count("M") == 2 and len(points(path)) == 4
    assert dots.count("M") == 4
    assert area.count("M") == 2 and area.count("Z") == 2 and len(points(area)) == 2 * 5


def test_an_axis_from_zero_and_the_areas_of_lines_and_bands() -> None:
    line = Line("a", _arange(3.0), np.asarray([4.0, 5.0, 6.0]), np.asarray([-1.0, 4.0, 5.0]), np.asarray([7, 8, 10.0]))
    drawing = draw(line_plot(lines=(line,), from_zero=True))
    assert drawing.axes.ys == (0.0, pytest.approx(10.8))
    assert max(y for _, y in points(paths(drawing, "range")[0])) == drawing.axes.box[3]  # no lower than the axis
    band = Band("b", line.x, line.y - 20, line.y + 20)
    low, high = draw(line_plot(lines=(line,), band=band)).axes.ys
    assert low < -16 and high > 26


def test_layers_stand_on_each_other_and_a_higher_bar_is_cut() -> None:
    layers = (Layer("one", np.asarray([1.0, 8.0])), Layer("two", np.asarray([2.0, 8.0])))
    total = Layer("<all>", np.asarray([2.5, 16.0]))
    plot = BarPlot(
        name="b", title="B", y_label="s", x=np.asarray([1.0, 2.0]), width=1.0, layers=layers, total=total, limit=4.0
    )
    drawing = draw(plot)
    one, two = (
        [tuple(map(float, re.findall(r"[\d.]+", box))) for box in path.split("Z")[:-1]]
        for path in paths(drawing, "bar")
    )
    top, bottom = drawing.axes.box[1], drawing.axes.box[3]
    unit = (bottom - top) / 4
    assert [one[0][1], one[0][3], two[0][1], two[0][3]] == pytest.approx(
        [bottom, bottom - unit, bottom - unit, bottom - 3 * unit], abs=0.01
    )
    assert one[1][3] == two[1][1] == two[1][3] == top
    assert [cut.label for cut in drawing.cuts] == ["↑ 16"]
    [across] = paths(drawing, "total")
    assert [y for _, y in points(across)] == pytest.approx(
        [bottom - 2.5 * unit], abs=0.01
    )  # of the bar that is not cut
    text = svg(drawing)
    assert text.index(">one</text>") < text.index(">two</text>") < text.index(">&lt;all&gt;</text>")


def test_lanes_and_labels_beyond_the_colours() -> None:
    bars = tuple(Bar(f"call {number}", number, number + 0.5) for number in range(SERIES + 3))
    labels_of_bars = tuple(bar.label for bar in bars)
    plot = LanePlot(
        name="t",
        title="T",
        y_label="",
        x_label="seconds",
        lanes=(("actor 0", bars), ("x", bars[:1])),
        labels=labels_of_bars,
    )
    drawing = draw(plot)
    assert labels(drawing)[1] == ["actor 0", "x"] and drawing.y_ticks[0].at < drawing.y_ticks[1].at
    assert [entry.label for entry in drawing.legend] == [*labels_of_bars[: SERIES - 1], "others"]
    shapes = {shape.series: shape.path.count("Z") for shape in drawing.shapes}
    assert shapes[0] == 2 and shapes[SERIES - 1] == 4 and len(shapes) == SERIES
    rows = {entry.y for entry in drawing.legend}
    assert drawing.axes.box[1] > max(rows)


def test_lines_beyond_the_colours_are_dashed() -> None:
    lines = tuple(Line(f"line {number}", _arange(2.0), _arange(2.0) + number) for number in range(SERIES + 1))
    text = svg(draw(line_plot(lines=lines), legend=True))
    assert len(re.findall(r'class="line" style="[^"]*stroke: var\(--series-0\)', text)) == 2
    assert len(re.findall(r'class="line" style="[^"]*stroke-dasharray: 5 2"', text)) == 1
    assert all(f">line {number}</text>" in text for number in range(SERIES + 1))


def test_no_name_in_the_metrics_becomes_an_element(tmp_path: Path) -> None:
    hostile = '"><script>alert(1)</script>'
    with Metrics(MetricsConfig(console=False, csv=False, tensorboard=False), tmp_path) as log:
        for step in (1, 2):
            log.log(step, {f"eval/{hostile.replace('/', '')}/mean@4": 0.1 * step}, phase="eval")
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    for number in range(SERIES):
        assert page.count(f"--series-{number}: #") == 2
