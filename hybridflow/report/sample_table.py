"""The table of sampled texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from hybridflow.report.run_data import RunData

_MOST_CHARACTERS = 600
_COLUMNS = ("step", "reward", "version", "prompt", "response", "answer")


def sample_table(run: RunData) -> str:
    """Samples of the first step that has some and of the last ones, as HTML; empty where there are none."""
    if not run.texts:
        return ""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "\n".join(map(_row, run.texts))
    return (
        '<h2>Samples</h2>\n<div class="samples"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n"
    )


def _row(text: Mapping[str, Any]) -> str:
    step = f"{text['phase']} {text['step']}"
    reward = text["reward"]
    shown = f"{reward:.4g}" if isinstance(reward, int | float) else str(reward)
    numbers = "".join(f"<td>{escape(str(value))}</td>" for value in (step, shown, text["version"]))
    return f"<tr>{numbers}{''.join(_cell(text[name]) for name in ('prompt', 'response', 'answer'))}</tr>"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text
    return f'<td class="text">{escape(cut)}</td>'
