"""The page: one HTML file that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.report.choice import Section, sections
from hybridflow.report.drawing import SERIES, draw
from hybridflow.report.facts import Fact, facts
from hybridflow.report.host_table import host_table
from hybridflow.report.plots import Plot
from hybridflow.report.run_data import RunData, read_run
from hybridflow.report.sample_table import sample_table
from hybridflow.report.set_table import set_table
from hybridflow.report.side_by_side import side_by_side
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import REPORT

# Ten colours that also those tell apart who see fewer, on white and on near black.
_LIGHT = ("#1f6fd6", "#d9640d", "#15803d", "#b8237b", "#7a52c7", "#0e8c9c", "#a16207", "#c53030", "#64748b", "#3f6212")
_DARK = ("#6aa9ff", "#ff9d4d", "#4ade80", "#f472b6", "#b79bff", "#3fd0e0", "#e0b34a", "#ff7b72", "#9fb0c5", "#b5d66a")
_LIGHT_PAGE = {"ink": "#1c2430", "muted": "#5b6675", "rule": "#c9d0d9", "paper": "#ffffff", "card": "#f7f8fa"}
_DARK_PAGE = {"ink": "#e4e8ee", "muted": "#9aa5b3", "rule": "#485363", "paper": "#12161c", "card": "#1a2028"}

_LAYOUT = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--rule); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 13rem), 1fr)); gap: .1rem 1.5rem;
  margin: 0; }
.facts div { padding: .35rem 0; border-bottom: 1px solid var(--rule); break-inside: avoid; }
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
<dl class="facts">
{"".join(map(_row, facts(run)))}</dl>
{set_table(run)}{"".join(map(_section, sections(run)))}{host_table(run)}{_texts(run, steps)}</body>
</html>
"""


def _texts(run: RunData, steps: tuple[int, int] | None) -> str:
    return side_by_side(run, steps) + sample_table(run)


def _row(fact: Fact) -> str:
    return f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd></div>\n"


def _section(section: Section) -> str:
    return f'<h2>{escape(section.title)}</h2>\n<div class="plots">\n{"".join(map(_figure, section.plots))}</div>\n'


def _figure(plot: Plot) -> str:
    svg = draw(plot).replace("<svg", f'<svg role="img" aria-label="{escape(plot.description())}"', 1)
    note = f"<p>{escape(plot.note)}</p>\n" if plot.note else ""
    kind = ' class="wide"' if plot.is_wide else ""
    caption = f"<figcaption>{escape(plot.title)}</figcaption>"
    return f'<figure id="{plot.name}"{kind}>\n{caption}\n<div class="scroll">{svg}</div>\n{note}</figure>\n'


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
