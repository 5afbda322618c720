"""The table of samples: those of the run's store, and those that it has written as texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from hybridflow.report.run_data import RunData
from hybridflow.report.stored_texts import StoredText

_MOST_CHARACTERS = 600
_COLUMNS = ("step", "reward", "version", "prompt", "response", "answer")
_OF_STORE = ("group", "sample", "data row", "length", "by function")


def sample_table(run: RunData) -> str:
    """Of the last steps in the run's store the samples of the highest and lowest rewards, and samples that were written
    as texts: of the first step that has some and of the last ones. As HTML; empty where there are none."""
    stored = {text.sample.step for text in run.stored}
    texts = [text for text in run.texts if text["phase"] != "train" or text["step"] not in stored]
    if not texts and not run.stored:
        return ""
    names = [*_COLUMNS[:3], *(_OF_STORE if stored else ()), *_COLUMNS[3:]]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "\n".join([*map(_stored_row, run.stored), *(_row(text, bool(stored)) for text in texts)])
    return (
        f'<h2>Samples</h2>\n{_note(run) if stored else ""}<div class="samples"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n"
    )


def _note(run: RunData) -> str:
    return (
        "<p>Of the last steps those of the highest and lowest rewards. "
        f"<code>hybridflow samples {escape(run.name)} --step N</code> shows the others.</p>\n"
    )


def _row(text: Mapping[str, Any], with_store: bool) -> str:
    step = f"{text['phase']} {text['step']}"
    reward = text["reward"]
    shown = f"{reward:.4g}" if isinstance(reward, int | float) else str(reward)
    others = ("", text.get("sample", ""), text.get("row", ""), "", "") if with_store else ()
    return _cells((step, shown, text["version"], *others), (text[name] for name in ("prompt", "response", "answer")))


def _stored_row(text: StoredText) -> str:
    sample = text.sample
    length = f"{len(sample.response_tokens)}, {sample.finish_reason}"
    by_name = ", ".join(f"{name} {value:.4g}" for name, value in sample.by_name.items())
    reward = "" if sample.reward is None else f"{sample.reward:.4g}"
    row = "" if sample.data_row is None else sample.data_row
    facts = (f"train {sample.step}", reward, sample.version, sample.group, sample.sample, row, length, by_name)
    return _cells(facts, iter((text.prompt, text.response, "")))


def _cells(facts: tuple[Any, ...], texts: Iterator[Any]) -> str:
    numbers = "".join(f"<td>{escape(str(value))}</td>" for value in facts)
    return f"<tr>{numbers}{''.join(map(_cell, texts))}</tr>"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text
    return f'<td class="text">{escape(cut)}</td>'
