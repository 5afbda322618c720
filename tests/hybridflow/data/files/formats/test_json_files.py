"""Files of JSON, whose names do not always say how their rows lie in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.data.files.config import FileSource
from hybridflow.data.files.formats.opening import files_of, open_rows
from hybridflow.data.files.formats.rows import Rows

ROWS = [{"a": "\u00e4", "b": [{"x": 1}]}, {"a": "2", "b": []}]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS)


def opened(path: Path, content: str | bytes) -> Rows:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    cache = path.parent / "cache"
    return open_rows(files_of(FileSource(path=(str(path),)), cache), cache)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.rstrip("\n"),
        f"\n \n{LINES}\n\n",
        LINES.replace("\n", "\r\n"),
        b"\xef\xbb\xbf" + LINES.encode(),
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=2).encode(),
    ],
)
def test_lines_and_lists_under_either_name(tmp_path: Path, name: str, content: str | bytes) -> None:
    rows = opened(tmp_path / name, content)
    assert [rows[number] for number in range(len(rows))] == ROWS
    if isinstance(content, str) and content.startswith("{"):
        assert rows.location(1) == f"{tmp_path / name}:2"


@pytest.mark.parametrize("content", [LINES, json.dumps(ROWS)])
@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz"])
def test_compressed_lines_and_lists_under_either_name(tmp_path: Path, name: str, content: str) -> None:
    rows = opened(tmp_path / name, gzip.compress(content.encode()))
    assert [rows[number] for number in range(len(rows))] == ROWS


@pytest.mark.parametrize("indent", [None, 1])
def test_one_object_is_a_row_or_holds_the_list_of_them(tmp_path: Path, indent: int | None) -> None:
    def rows_of(value: Any) -> list[Any]:
        rows = opened(tmp_path / "a.json", json.dumps(value, indent=indent))
        return [rows[number] for number in range(len(rows))]

    assert rows_of(ROWS[0]) == ROWS[:1]
    assert rows_of({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}) == [
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}
    ]
    assert rows_of({"version": "1", "data": ROWS}) == ROWS
    with pytest.raises(UserError, match="an object with the lists 'train' and 'test', expected one list of objects"):
        rows_of({"train": ROWS, "test": ROWS})
    for columns in ({"a": ["1", "2"], "b": ["3", "4"]}, {"a": {"0": "1", "1": "2"}, "b": {"0": "3", "1": "4"}}):
        with pytest.raises(UserError, match=r"an object of columns, expected a list of rows, such as pandas writes"):
            rows_of(columns)


def test_a_name_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    rows = opened(tmp_path / "a.jsonl", '{"a": 1}\n{"b": {"a": 1, "a": 2}}\n')
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: not JSON \('a' is in an object twice\), expected one object a line"
    ):
        rows[1]
