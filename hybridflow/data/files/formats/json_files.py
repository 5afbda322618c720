"""Files of JSON as rows: one object a line, or one list of objects, independent of the file's name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_DIGITS_OF_DATA, MOST_LINE_BYTES, JsonError, json_kind, parse_json
from hybridflow.data.files.config import Format

MOST_JSON_BYTES = 1 << 30
"""Largest file that is one list of objects."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LISTS = ("data", "rows", "train", "test", "validation", "examples", "instances", "items", "records")
"""Names under which an object holds the list of rows."""


def is_lines(path: Path, format: Format) -> bool:
    """True if a file has a row on each line.

    Args:
        path: of the file.
        format: by the name of the file, "jsonl" or "json".
    """
    with path.open("rb") as read:
        lines = (line.removeprefix(_BYTE_ORDER_MARK) for line in iter(lambda: read.readline(MOST_LINE_BYTES), b""))
        nonblank = (line for line in lines if line.strip())
        first = next(nonblank, b"").lstrip()
        if format == "jsonl":
            return not first.startswith(b"[")
        try:
            parse_json(first, most_digits=MOST_DIGITS_OF_DATA)
        except JsonError:
            return False
        return first.startswith(b"{") and next(nonblank, None) is not None


def write_lines(path: Path, target: Path, name: str) -> None:
    """Write a list of objects as one object a line.

    Args:
        path: of the file.
        target: file of the lines.
        name: of the file in errors.

    Raises:
        UserError: the file is no list of objects.
    """
    with path.open("rb") as read:
        data = read.read(MOST_JSON_BYTES + 1)
    if len(data) > MOST_JSON_BYTES:
        raise UserError(
            f"{name}: more than {MOST_JSON_BYTES:,} bytes in one list of JSON, expected one object a line (jsonl)"
        )
    try:
        rows = _rows_of(parse_json(data, most_digits=MOST_DIGITS_OF_DATA, unique_names=True), name)
    except JsonError as error:
        raise UserError(f"{name}: not JSON ({shortened(str(error), 120)})") from None
    if not rows:
        raise UserError(f"{name} holds no rows")
    target.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _rows_of(value: Any, name: str) -> list[Any]:
    if isinstance(value, Mapping):
        lists = [key for key in _LISTS if _are_objects(value.get(key))]
        if len(lists) > 1:
            names = " and ".join(map(repr, lists))
            raise UserError(
                f"{name}: an object with the lists {names}, expected one list of objects; or a file for each"
            )
        if lists:
            return list(value[lists[0]])
        if _are_columns(value):
            raise UserError(
                f"{name}: an object of columns, expected a list of rows, such as pandas writes with "
                "to_json(orient='records')"
            )
        return [value]
    if not _are_objects(value) and value != []:
        raise UserError(f"{name}: {json_kind(value)}, expected one list of objects, or one object a line")
    return list(value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(element, dict) for element in value)


def _are_columns(value: Mapping[str, Any]) -> bool:
    """True for columns as pandas and `datasets` write them: lists of one length, or objects by the rows' numbers."""
    columns = list(value.values())
    if len(columns) < 2:
        return False
    if all(isinstance(column, list) for column in columns):
        return len({len(column) for column in columns}) == 1
    by_number = (
        isinstance(column, dict) and column.keys() == columns[0].keys() and "0" in column for column in columns
    )
    return all(itertools.chain(by_number))
