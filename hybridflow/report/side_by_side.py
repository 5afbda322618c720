"""Responses to held-out prompts after two steps, side by side."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from hybridflow.report.run_data import RunData
from hybridflow.rundir.evaluation_texts import EvaluationText, read_texts, steps_with_texts, text_file

_MOST_CHARACTERS = 600


def side_by_side(run: RunData, steps: tuple[int, int] | None = None) -> str:
    """A table for each set that has texts, as HTML; empty where none has.

    Args:
        run: with the directory of the texts.
        steps: the two; the first and the last of each set if None.

    Raises:
        UserError: no set has texts of one of these steps, or a file cannot be read.
    """
    there = steps_with_texts(run.evaluations) if run.evaluations is not None else {}
    if steps is not None:
        for step in steps:
            if not any(step in each for each in there.values()):
                known = sorted({step for each in there.values() for step in each})
                raise UserError(f"report: no texts of held-out sets of step {step}; there are those of steps {known}")
    tables = []
    for name, own in there.items():
        chosen = dict.fromkeys(step for step in (steps or (own[0], own[-1])) if step in own)
        assert run.evaluations is not None
        if chosen:
            tables.append(_table(run.evaluations, name, list(chosen)))
    return f"<h2>Responses to held-out prompts</h2>\n{''.join(tables)}" if tables else ""


def _table(directory: Path, name: str, steps: list[int]) -> str:
    by_step = {step: {each.index: each for each in read_texts(text_file(directory, name, step))} for step in steps}
    prompts = {index: each for step in reversed(steps) for index, each in by_step[step].items()}
    heads = [f"set {name}: prompt", "answer", *(f"step {step}" for step in steps)]
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    rows = "\n".join(
        f"<tr>{_cell(prompts[index].prompt)}{_cell(prompts[index].answer)}"
        f"{''.join(_response(by_step[step].get(index)) for step in steps)}</tr>"
        for index in sorted(prompts)
    )
    return f'<div class="samples"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n'


def _response(text: EvaluationText | None) -> str:
    """The first response, with its reward and how many of all responses to the prompt pass."""
    if text is None:
        return _cell("")
    reward = "no reward" if text.reward is None else f"reward {text.reward:.4g}"
    passing = f"{text.passing} of {text.scored} pass"
    return f'<td class="text">{escape(_cut(text.response))}\n<small>{escape(f"{reward}; {passing}")}</small></td>'


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f'<td class="text">{escape(_cut(text))}</td>'


def _cut(text: str) -> str:
    return f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text
