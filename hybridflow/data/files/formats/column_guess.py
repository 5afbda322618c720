"""Guess of a file's columns of prompts and answers, by their names and its first rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.input_files import json_text
from hybridflow.data.answers import is_missing
from hybridflow.data.files.conversations.messages import read_messages
from hybridflow.data.files.formats.rows import Row

PROMPTS = (
    *("messages", "prompt", "question", "problem", "instruction", "query", "conversation", "conversations"),
    *("chat", "input", "task", "text", "extra_info.question"),
)
"""Names of columns of prompts, in the order of preference. Upper and lower case are alike."""
ANSWERS = (
    *("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "expected_answer", "target", "label"),
    *("reference_answer", "reference", "solution", "response", "output", "completion", "extra_info.answer"),
)
"""Names of columns of answers, likewise."""


@dataclass(frozen=True)
class GuessedColumns:
    """Columns that are read of a file.

    Args:
        prompt: column of the prompts.
        answer: column of the answers; None if there is none.
        others: columns that are neither.
        has_messages: prompts are lists of messages, not texts.
        has_text_answers: answers of the rows that were read are texts.
    """

    prompt: str
    answer: str | None
    others: tuple[str, ...]
    has_messages: bool
    has_text_answers: bool


def guess_columns(
    rows: Sequence[Row], name: str, *, prompt: str | None = None, answer: str | None = None
) -> GuessedColumns:
    """The columns of prompts and answers.

    Args:
        rows: the first ones of the file, at least one.
        name: of the file, for errors.
        prompt, answer: columns that the user has named.

    Raises:
        UserError: no column is known to hold prompts, a named one is not there, or its values are no prompts.
    """
    there = _columns(rows)
    for option, given in (("--prompt", prompt), ("--answer", answer)):
        if given is not None and given not in there:
            raise UserError(f"{option} {shortened(given)}: {name} has no such column, only {_listed(there)}")
    prompt_column = prompt or _first(PROMPTS, there, lambda value: bool(value) and isinstance(value, str | list), rows)
    if prompt_column is None:
        raise UserError(
            f"{name}: none of its columns ({_listed(there)}) is known to hold prompts; name it with --prompt COLUMN, "
            "and that of the answers with --answer COLUMN"
        )
    others = tuple(column for column in there if column != prompt_column)
    reference = answer or _first(ANSWERS, others, lambda value: not is_missing(value), rows)
    messages = isinstance(_value(rows[0], prompt_column), list)
    for number, row in enumerate(rows):
        _check_prompt(_value(row, prompt_column), f"{name}: row {number}: {prompt_column}")
    answers = [_value(row, reference) for row in rows] if reference is not None else []
    used = {prompt_column, reference}
    unused = tuple(
        column
        for column in there
        if "." not in column and not any(f"{taken}.".startswith(f"{column}.") for taken in used if taken)
    )
    return GuessedColumns(
        prompt_column, reference, unused, messages, bool(answers) and all(isinstance(answer, str) for answer in answers)
    )


def _check_prompt(value: Any, location: str) -> None:
    """Raises UserError for a prompt that is neither a text nor messages that an assistant may answer."""
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UserError(f"{location} is {json_text(value)}, expected a text, or messages with role and content")
    if read_messages(value, location)[-1]["role"] == "assistant":
        raise UserError(
            f"{location} ends with a message of the assistant, expected a prompt, which ends with the user's: the "
            "answer belongs into a column of its own"
        )


def _first(names: Sequence[str], there: Sequence[str], fits: Callable[[Any], bool], rows: Sequence[Row]) -> str | None:
    """The first column of these names that fits in some row."""
    by_name = {column.lower(): column for column in reversed(there)}
    known = (by_name[name] for name in names if name in by_name)
    return next((column for column in known if any(fits(_value(row, column)) for row in rows)), None)


def _columns(rows: Sequence[Row]) -> list[str]:
    """All columns, and the keys of objects in them as `column.key`."""
    names: dict[str, None] = {}
    for row in rows:
        for column, value in row.items():
            names[column] = None
            if isinstance(value, dict):
                names |= dict.fromkeys(f"{column}.{key}" for key in value)
    return list(names)


def _value(row: Row, column: str) -> Any:
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    value = row.get(outer)
    return value.get(inner) if isinstance(value, dict) else None


def _listed(names: Sequence[str]) -> str:
    return shortened(", ".join(names), 200)
