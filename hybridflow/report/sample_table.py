"""The table of samples: those of the run's store, and those that it has written as texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from hybridflow.report.run_data import RunData
from hybridflow.report.stored_texts import StoredText

_MOST_CHARACTERS = 600
_TEXTS = ("prompt", "response", "answer")
_COLUMNS = ("step", "times", "reward", "version", "group", "sample", "data row", "length", "by function", *_TEXTS)


@dataclass
class _Row:
    """A distinct sample: cells by the name of their column, and how often it was drawn."""

    cells: Mapping[str, Any]
    times: int = 1

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for samples that look the same."""
        return tuple(str(self.cells.get(name, "")) for name in ("step", "reward", *_TEXTS))


@dataclass
class _Rows:
    """Distinct samples, in the order of the first of each."""

    rows: dict[tuple[Any, ...], _Row] = field(default_factory=dict)

    def add(self, row: _Row) -> None:
        """Add a sample, or count it where an equal one is there."""
        if (there := self.rows.get(row.identity)) is not None:
            there.times += 1
        else:
            self.rows[row.identity] = row


def sample_table(run: RunData) -> str:
    """The distinct samples of a run as HTML; empty where there are none.

    Of the last steps in the run's store those of the highest and lowest rewards, and samples that were written as
    texts: of the first step that has some and of the last ones. Columns that no sample has a value for are left out.
    """
    stored = {text.sample.step for text in run.stored}
    texts = [text for text in run.texts if text["phase"] != "train" or text["step"] not in stored]
    found = _Rows()
    for sample in run.stored:
        found.add(_stored_row(sample, run.texts))
    for text in texts:
        found.add(_row(text))
    rows = list(found.rows.values())
    if not rows:
        return ""
    if any(row.times > 1 for row in rows):
        rows = [_Row({**row.cells, "times": row.times}, row.times) for row in rows]
    names = [name for name in _COLUMNS if any(row.cells.get(name, "") not in ("", None) for row in rows)]
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = "\n".join(f"<tr>{''.join(_cell(name, row.cells.get(name, '')) for name in names)}</tr>" for row in rows)
    return (
        f'<h2>Samples</h2>\n{_note(run) if stored else ""}<div class="samples"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table></div>\n"
    )


def _note(run: RunData) -> str:
    return (
        "<p>Distinct samples of the last steps: those of the highest and lowest rewards. "
        f"<code>hybridflow samples {escape(run.name)} --step N</code> shows the others.</p>\n"
    )


def _row(text: Mapping[str, Any]) -> _Row:
    reward = text["reward"]
    return _Row(
        {
            "step": f"{text['phase']} {text['step']}",
            "reward": f"{reward:.4g}" if isinstance(reward, int | float) else str(reward),
            "version": text["version"],
            "sample": text.get("sample", ""),
            "data row": text.get("row", ""),
            **{name: text[name] for name in _TEXTS},
        }
    )


def _stored_row(text: StoredText, texts: Sequence[Mapping[str, Any]]) -> _Row:
    sample = text.sample
    answer = sample.answer
    if answer is None:  # a store of earlier versions has none: perhaps the sample was written as a text too
        same = (each for each in texts if each["phase"] == "train" and each.get("sample") == sample.sample)
        answer = next((each["answer"] for each in same), "")
    return _Row(
        {
            "step": f"train {sample.step}",
            "reward": "" if sample.reward is None else f"{sample.reward:.4g}",
            "version": sample.version,
            "group": sample.group,
            "sample": sample.sample,
            "data row": sample.data_row or "",
            "length": f"{len(sample.response_tokens)}, {sample.finish_reason}",
            "by function": ", ".join(f"{name} {value:.4g}" for name, value in sample.by_name.items()),
            "prompt": text.prompt,
            "response": text.response,
            "answer": answer,
        }
    )


def _cell(name: str, value: Any) -> str:
    if name not in _TEXTS:
        return f"<td>{escape(str(value))}</td>"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text
    return f'<td class="text">{escape(cut)}</td>'
