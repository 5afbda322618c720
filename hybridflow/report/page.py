"""The page: one HTML file that needs nothing beside itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.report.choice import Section, sections, unplotted
from hybridflow.report.drawing import SERIES, Axes2D, draw
from hybridflow.report.facts import Fact, facts
from hybridflow.report.host_table import host_table
from hybridflow.report.plots import LinePlot, Plot
from hybridflow.report.run_data import RunData, read_run
from hybridflow.report.sample_table import sample_table
from hybridflow.report.set_table import set_table
from hybridflow.report.side_by_side import side_by_side
from hybridflow.report.words import in_words
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import REPORT

# Ten colours that also those tell apart who see fewer, on white and on near black.
_LIGHT = ("#1f6fd6", "#d9640d", "#15803d", "#b8237b", "#7a52c7", "#0e8c9c", "#a16207", "#c53030", "#64748b", "#3f6212")
_DARK = ("#6aa9ff", "#ff9d4d", "#4ade80", "#f472b6", "#b79bff", "#3fd0e0", "#e0b34a", "#ff7b72", "#9fb0c5", "#b5d66a")
_LIGHT_PAGE = {"ink": "#1c2430", "muted": "#5b6675", "rule": "#c9d0d9", "paper": "#ffffff", "card": "#f7f8fa"}
_DARK_PAGE = {"ink": "#e4e8ee", "muted": "#9aa5b3", "rule": "#485363", "paper": "#12161c", "card": "#1a2028"}
_BORDERS = ("solid", "dashed", "dotted", "double")
"""Border styles of the marks of lines, whose colours begin again with the next one."""
_LONG = 80
"""Characters of a fact that takes the whole width."""

_LAYOUT = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--rule); }
.outcome { font-size: 1.05rem; margin: -.4rem 0 1rem; overflow-wrap: anywhere; white-space: pre-line; }
nav { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; align-items: center;
  padding: .45rem 0; margin: 1rem 0 0; background: var(--paper); border-bottom: 1px solid var(--rule); }
nav a { color: inherit; }
#smoothing { margin-left: auto; color: var(--muted); font-size: .85rem; display: flex; gap: .5rem;
  align-items: center; }
#smoothing[hidden] { display: none; }
#smoothing output { min-width: 2.2em; font-variant-numeric: tabular-nums; }
h2 { scroll-margin-top: 3rem; }
details { margin: 1rem 0 0; }
summary { cursor: pointer; color: var(--muted); }
details pre { overflow-x: auto; padding: .8rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: .5rem; font-size: .82rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 13rem), 1fr)); gap: .1rem 1.5rem;
  margin: 0; }
.facts div { padding: .35rem 0; border-bottom: 1px solid var(--rule); break-inside: avoid; }
.facts .wide { grid-column: 1 / -1; }
.facts dt { color: var(--muted); font-size: .82rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem .9rem .6rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: .5rem; min-width: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
figure p { color: var(--muted); font-size: .82rem; margin: .2rem 0 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: 0 0 .3rem; padding: 0; list-style: none;
  font-size: .82rem; }
.legend i { display: inline-block; width: 1.3em; margin-right: .4em; vertical-align: .25em;
  border-top: 2px solid var(--mark); }
.legend i.band { height: .7em; border: 0; background: var(--mark); opacity: .25; vertical-align: -.05em; }
.legend code { color: var(--muted); font-size: .92em; overflow-wrap: anywhere; }
.plot { position: relative; }
.hover line { stroke: var(--muted); stroke-width: .6; }
.hover { pointer-events: none; }
.smooth { fill: none; stroke-width: 1.7; pointer-events: none; }
figure.smoothed [id*="-line-"] { opacity: .25; }
.tip { position: absolute; display: none; z-index: 1; max-width: 22rem; padding: .3rem .55rem; pointer-events: none;
  background: var(--paper); border: 1px solid var(--rule); border-radius: .35rem; font-size: .8rem;
  font-variant-numeric: tabular-nums; }
.tip i { display: inline-block; width: .6em; height: .6em; margin-right: .4em; border-radius: 50%; }
.samples { overflow-x: auto; }
.samples table { border-collapse: collapse; width: 100%; font-size: .85rem; }
.samples th { text-align: left; color: var(--muted); font-weight: normal; }
.samples th, .samples td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.samples td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.samples td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 8rem; max-width: 34rem;
  font-family: ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; }
@media (max-width: 50rem) {
  figure.wide .scroll { overflow-x: auto; }
  figure.wide svg { min-width: 44rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .plots { grid-template-columns: 1fr 1fr; gap: .5rem; }
  h2 { break-after: avoid; }
  nav { display: none; }
}
"""


def write_report(directory: Path, out: Path | None = None, steps: tuple[int, int] | None = None) -> Path:
    """Draw a run's metrics.

    Args:
        directory: of the run.
        out: the file to write; `report.html` in the run's directory if None.
        steps: whose responses to held-out prompts stand side by side; the first and the last if None.

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
    """The whole page as text. `steps` as of `write_report`."""
    name = escape(run.name)
    outcome = f'<p class="outcome">{escape(run.outcome)}</p>\n' if run.outcome else ""
    body, nav = _linked(
        f"{set_table(run)}{''.join(map(_section, sections(run)))}{_unplotted(run)}{host_table(run)}{_texts(run, steps)}"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: run report</title>
<style>{_colours()}{_LAYOUT}</style>
</head>
<body>
<h1>{name}</h1>
{outcome}<dl class="facts">
{"".join(map(_row, facts(run)))}</dl>
{_recipe(run)}{nav}{body}<script>
{_script()}</script>
</body>
</html>
"""


def _linked(body: str) -> tuple[str, str]:
    """Give the headings of a body identifiers. The body, and links to them with the control of the smoothing."""
    names: list[str] = []

    def with_identifier(found: re.Match[str]) -> str:
        names.append(found[1])
        return f'<h2 id="section-{len(names)}">{found[1]}</h2>'

    body = re.sub("<h2>([^<]*)</h2>", with_identifier, body)
    links = "".join(f'<a href="#section-{number}">{name}</a>\n' for number, name in enumerate(names, 1))
    return body, (
        f'<nav aria-label="Sections">\n{links}<label id="smoothing" hidden>Smoothing\n'
        '<input type="range" min="0" max="0.98" step="0.02" value="0"><output>0</output></label>\n</nav>\n'
    )


def _recipe(run: RunData) -> str:
    if not run.recipe_text:
        return ""
    return f"<details><summary>Recipe</summary><pre>{escape(run.recipe_text)}</pre></details>\n"


def _unplotted(run: RunData) -> str:
    """The metrics whose lines would say nothing, folded."""
    found = unplotted(run)
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{escape(in_words(each.name))}</td><td><code>{escape(each.name)}</code></td>"
        f"<td>{'not finite' if each.value is None else f'{each.value:.6g}'}</td><td>{each.steps:,}</td></tr>\n"
        for each in found
    )
    count = f"{len(found)} metrics" if len(found) > 1 else "1 metric"
    return (
        f"<details><summary>{count} without a plot: constant, or measured once</summary>\n"
        '<div class="samples"><table>\n<thead><tr><th></th><th>metric</th><th>value</th><th>steps</th></tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div></details>\n"
    )


def _script() -> str:
    return Path(__file__).with_name("page.js").read_text()


def _texts(run: RunData, steps: tuple[int, int] | None) -> str:
    return side_by_side(run, steps) + sample_table(run)


def _row(fact: Fact) -> str:
    kind = ' class="wide"' if len(fact.value) > _LONG else ""
    return f"<div{kind}><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd></div>\n"


def _section(section: Section) -> str:
    return f'<h2>{escape(section.title)}</h2>\n<div class="plots">\n{"".join(map(_figure, section.plots))}</div>\n'


def _figure(plot: Plot) -> str:
    drawing = draw(plot)
    svg = drawing.svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.description())}"', 1)
    legend, data = (_legend(plot), _data(plot, drawing.axes)) if isinstance(plot, LinePlot) else ("", "")
    note = f"<p>{escape(plot.note)}</p>\n" if plot.note else ""
    kind = ' class="wide"' if plot.is_wide else ""
    caption = f"<figcaption>{escape(plot.title)}</figcaption>"
    return (
        f'<figure id="{plot.name}"{kind}>\n{caption}\n{legend}<div class="scroll plot">{svg}</div>\n{note}{data}'
        "</figure>\n"
    )


def _legend(plot: LinePlot) -> str:
    """Each line in words, with the name of its metric."""
    rows = []
    if plot.band is not None:
        rows.append(f'<i class="band" style="--mark: var(--series-0)"></i>{escape(plot.band.label)}')
    for number, line in enumerate(plot.lines):
        words = in_words(line.label)
        name = f" <code>{escape(line.label)}</code>" if words != line.label else ""
        style = (
            f"--mark: var(--series-{number % SERIES}); border-top-style: {_BORDERS[number // SERIES % len(_BORDERS)]}"
        )
        rows.append(f'<i style="{style}"></i>{escape(words)}{name}')
    return f'<ul class="legend">{"".join(f"<li>{row}</li>" for row in rows)}</ul>\n'


def _data(plot: LinePlot, axes: Axes2D) -> str:
    """The points of a plot for the page's script."""
    lines = [{"words": in_words(line.label), "x": _numbers(line.x), "y": _numbers(line.y)} for line in plot.lines]
    values = {
        "axes": {"box": _numbers(axes.box), "xs": axes.xs, "ys": axes.ys, "log": axes.log},
        "colours": SERIES,
        "lines": lines,
        "x_label": plot.x_label,
    }
    text = json.dumps(values, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # no end of the element
    return f'<script type="application/json">{text}</script>\n'


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Six digits of each; None for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _colours() -> str:
    light, dark = _variables(_LIGHT_PAGE, _LIGHT), _variables(_DARK_PAGE, _DARK)
    return (
        f"\n:root {{ color-scheme: light dark; {light} }}"
        f"\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def _variables(page: Mapping[str, str], series: Iterable[str]) -> str:
    colours = {**page, **{f"series-{number}": colour for number, colour in enumerate(series)}}
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


assert len(_LIGHT) == len(_DARK) == SERIES
