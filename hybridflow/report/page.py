"""The page of a run: one HTML file that needs no other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from engine3d.errors import UserError
from hybridflow.report.catalogue import in_words
from hybridflow.report.choice import sections, unplotted
from hybridflow.report.drawing import SERIES, Drawing, LegendEntry, draw, legend_of
from hybridflow.report.expert_loads import rows_table
from hybridflow.report.held_out_sets import responses_side_by_side, set_table
from hybridflow.report.plots import HeatPlot, LinePlot, Plot
from hybridflow.report.run_data import RunData, read_run
from hybridflow.report.tables import Table, host_table, prediction_table, sample_table, summary
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import REPORT


@dataclass(frozen=True)
class Figure:
    """A plot in the page.

    Args:
        drawing: of the plot.
        legend: above the drawing; empty if it is inside.
        points: values for the script of the page; None if it has none to show.
        table: the same in numbers; None if there is none.
    """

    drawing: Drawing
    legend: Sequence[LegendEntry] = ()
    points: Mapping[str, Any] | None = None
    table: Table | None = None


def write_report(directory: Path, out: Path | None = None, steps: tuple[int, int] | None = None) -> Path:
    """Draw a run's metrics.

    Args:
        directory: of the run.
        out: the file to write; `report.html` in the run's directory if None.
        steps: whose responses to held-out prompts and loads of experts are shown; the first and the last if None.

    Returns:
        The file that was written.

    Raises:
        UserError: there is nothing to draw, something cannot be read, or the file cannot be written.
    """
    page = render(read_run(directory), steps)
    path = directory / REPORT if out is None else out
    try:
        replace_file(path, page)
    except OSError as error:
        raise UserError(f"report: cannot write {path}: {error.strerror}") from None
    return path


def render(run: RunData, steps: tuple[int, int] | None = None) -> str:
    """Return the page as text. `steps` as in `write_report`."""
    template = _environment().get_template("page.html.jinja")
    return template.render(
        run=run,
        summary=summary(run),
        sets=set_table(run),
        sections=[(section.title, list(map(_figure, section.plots))) for section in sections(run, steps)],
        unplotted=unplotted(run),
        predicted=prediction_table(run),
        hosts=host_table(run),
        responses=responses_side_by_side(run, steps),
        samples=sample_table(run),
    )


def svg(drawing: Drawing) -> str:
    """Return a drawing as an SVG file whose colours are CSS variables."""
    module: Any = _environment().get_template("plot.svg.jinja").module
    return str(module.svg(drawing))


def _environment() -> Environment:
    """Return the environment of the templates, which escapes every text that is put into one."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colours"] = SERIES
    environment.filters["in_words"] = in_words
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _figure(plot: Plot) -> Figure:
    drawing = draw(plot)
    if isinstance(plot, HeatPlot):
        names = {"row": plot.y_label, "column": plot.x_label, "unit": plot.unit}
        cells = {"rows": plot.rows, "values": [_numbers(row, digits=4) for row in plot.values]}
        return Figure(drawing, points={"box": _numbers(drawing.axes.box), **names, **cells}, table=rows_table(plot))
    if not isinstance(plot, LinePlot):
        return Figure(drawing)
    axes = drawing.axes
    points = {
        "axes": {"box": _numbers(axes.box), "xs": axes.xs, "ys": axes.ys, "log": axes.log},
        "colours": SERIES,
        "lines": [{"words": in_words(line.label), "x": _numbers(line.x), "y": _numbers(line.y)} for line in plot.lines],
        "x_label": plot.x_label,
    }
    return Figure(drawing, legend_of(plot), points)


def _numbers(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """Round to some digits; None for what is not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
