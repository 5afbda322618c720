"""Columns of prompts and answers of layouts that people have."""

from __future__ import annotations

from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.data.files.formats.column_guess import guess_columns

ASKED = [{"role": "user", "content": "2+2"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "others"),
    [
        ({"question": "2+2", "answer": "4 #### 4"}, "question", "answer", ()),
        ({"problem": "p", "solution": "s", "answer": "a", "level": 5}, "problem", "answer", ("solution", "level")),
        ({"Question": "q", "Answer": "a"}, "Question", "Answer", ()),
        (
            {"data_source": "d", "prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": "4"}},
            "prompt",
            "reward_model.ground_truth",
            ("data_source",),
        ),
        ({"messages": ASKED, "label": 4}, "messages", "label", ()),
        ({"prompt": "p"}, "prompt", None, ()),
        ({"instruction": "i", "input": "", "output": "o"}, "instruction", "output", ("input",)),
        ({"prompt": None, "question": "q", "answer": None, "target": "t"}, "question", "target", ("prompt", "answer")),
    ],
)
def test_columns_are_known_by_their_names(
    row: dict[str, Any], prompt: str, answer: str | None, others: tuple[str, ...]
) -> None:
    columns = guess_columns([row], "file")
    assert (columns.prompt, columns.answer, columns.others) == (prompt, answer, others)


def test_what_the_user_names_comes_first() -> None:
    rows = [{"prompt": "p", "body": "b", "answer": "a", "points": 3}]
    columns = guess_columns(rows, "file", prompt="body", answer="points")
    assert (columns.prompt, columns.answer, columns.has_text_answers) == ("body", "points", False)
    assert guess_columns(rows, "file").has_text_answers
    with pytest.raises(UserError, match="--answer none: file has no such column, only prompt, body, answer, points"):
        guess_columns(rows, "file", answer="none")


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"headline": "a", "body": "b"}, r"none of its columns \(headline, body\) is known to hold prompts; name it"),
        ({"messages": ANSWERED}, "row 0: messages ends with a message of the assistant"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "row 0: conversations ends with a message of the assistant",
        ),
        ({"conversations": [{"text": "a"}]}, "expected an object with role and content"),
        ({"prompt": ["a"]}, "expected a text, or messages with role and content"),
    ],
)
def test_what_is_no_prompt_is_refused(row: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        guess_columns([row], "file")


def test_messages_of_from_and_value_are_prompts() -> None:
    assert guess_columns([{"conversations": [{"from": "human", "value": "a"}]}], "file").has_messages
