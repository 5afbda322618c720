"""Rows of files, read where they lie."""

from __future__ import annotations

import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine3d.errors import UserError
from engine3d.input_files import AS_UTF8, MOST_LINE_BYTES
from hybridflow.data.files.formats.columns import plain
from hybridflow.data.files.formats.rows import (
    ArrowRows,
    Concatenated,
    JsonLines,
    Rows,
    batches,
    needed,
    value_of,
)


def lines(path: Path, data: bytes) -> JsonLines:
    path.write_bytes(data)
    return JsonLines(path)


def all_rows(rows: Rows) -> list[Any]:
    return list(rows.read(0, len(rows)))


def test_lines_by_their_numbers_with_blank_ones_between(tmp_path: Path) -> None:
    rows = lines(tmp_path / "a.jsonl", b'\n \t\r\n{"a":1}\r\n\n  {"a":2}\n\x0b\x0c\n\n{"a":3}')
    assert all_rows(rows) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [rows.location(number).rpartition(":")[2] for number in range(3)] == ["3", "5", "8"]
    assert rows.columns == ("a",)
    assert rows[2] == {"a": 3}


def test_what_separates_lines_is_the_line_feed_alone(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x1ce"
    raw = json.dumps({"a": text}, ensure_ascii=False).replace("\\u001c", "\\u001c").encode()
    rows = lines(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + raw + b"\n" + raw + b"\r\n")  # a byte order mark is no text
    assert all_rows(rows) == [{"a": text}] * 2


def test_offsets_of_lines_of_any_shape(tmp_path: Path) -> None:
    generator = random.Random(7)
    for trial in range(150):
        expected, data, line = [], b"", 0
        for _ in range(generator.randrange(1, 12)):
            line += 1
            if generator.random() < 0.4:
                data += generator.choice([b"", b" ", b"\t ", b"\r", b"\x0c"]) + b"\n"
                continue
            value = "".join(generator.choices('a\u2028\u00e4\ufeff\U0001f600 \\"\x00\r\n', k=generator.randrange(6)))
            expected.append((line, {"v": value}))
            text = json.dumps({"v": value}, ensure_ascii=generator.random() < 0.5)
            data += generator.choice(["", " ", "\t"]).encode() + text.encode() + generator.choice([b"\n", b"\r\n"])
        if generator.random() < 0.5:
            data = data.removesuffix(b"\n")
        path = tmp_path / f"{trial}.jsonl"
        if not expected:
            with pytest.raises(UserError, match=r"holds no rows|is empty"):
                lines(path, data)
            continue
        rows = lines(path, data)
        assert all_rows(rows) == [row for _, row in expected]
        assert [rows.location(number) for number in range(len(rows))] == [f"{path}:{line}" for line, _ in expected]


@pytest.mark.slow
def test_lines_across_the_blocks_that_are_searched(tmp_path: Path) -> None:
    block = 1 << 24
    long = {"a": "x" * (block - 100)}
    rows = lines(
        tmp_path / "a.jsonl", b"\n".join([json.dumps(long).encode(), b'{"a": "y"}' * 1, b" " * 200, b'{"b":1}'])
    )
    assert len(rows) == 3
    assert (len(rows[0]["a"]), rows[1], rows[2]) == (block - 100, {"a": "y"}, {"b": 1})
    assert rows.location(2).endswith(":4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "not JSON (no comma at column 8), expected one object a line"),
        (
            b'{"a": "\x00"}',
            "not JSON (a control character at column 8), expected one object a line",
        ),
        (b'{"a": "\xff"}', f"not JSON (not text in UTF-8; {AS_UTF8}), expected one object a line"),
        (b"[1]", "a list, expected an object"),
        (b"nul", "not JSON (no JSON value at column 1), expected one object a line"),
        (
            b'{"a": ' + b"1" * 5000 + b"}",
            "not JSON (a whole number has 5,000 digits, expected at most 4,000), expected",
        ),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "not JSON (nested more than 64 levels deep), expected"),
        (b'{"a": "' + b"x" * MOST_LINE_BYTES + b'"}', "more than 16,777,216 bytes in a line, expected at most that"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    rows = lines(tmp_path / "a.jsonl", b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(UserError) as error:
        rows[1]
    assert str(error.value).startswith(f"{tmp_path}/a.jsonl:3: {message}")


def test_files_without_rows(tmp_path: Path) -> None:
    for data, message in (
        (b"", "is empty, expected one JSON object a line"),
        (b"\n \n", "holds no rows, expected one"),
    ):
        with pytest.raises(UserError) as error:
            lines(tmp_path / "a.jsonl", data)
        assert str(error.value).startswith(f"{tmp_path}/a.jsonl {message}")
    with pytest.raises(UserError, match=r"no\.jsonl: no such file"):
        JsonLines(tmp_path / "no.jsonl")
    with pytest.raises(UserError, match="is a directory, expected a regular file"):
        JsonLines(tmp_path)


def table(count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"a": number, "b": {"c": f"x{number}"}} for number in range(count)])


def test_rows_of_arrow_in_any_range() -> None:
    rows = ArrowRows([table(3), table(0), table(4), table(1)], "name")
    expected = [{"a": number, "b": {"c": f"x{number}"}} for count in (3, 4, 1) for number in range(count)]
    assert len(rows) == 8
    for begin in range(9):
        for end in range(begin, 9):
            assert list(rows.read(begin, end)) == expected[begin:end]
    assert [rows[number] for number in range(8)] == expected
    assert (rows.location(5), rows.columns) == ("name, row 5", ("a", "b"))
    with pytest.raises(UserError, match="name holds no rows"):
        ArrowRows([table(0)], "name")


def test_columns_of_bytes_are_left_out_and_two_of_a_name_refused() -> None:
    batch = pa.RecordBatch.from_pylist(
        [{"a": 1, "image": {"bytes": b"\xff", "path": "p"}, "raw": b"\xff", "many": [b"\xff"]}]
    )
    assert ArrowRows([batch], "name").columns == ("a",)
    assert ArrowRows([batch], "name").left_out == ("image", "raw", "many")
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(UserError, match="name: there are two columns named 'a', expected each name once"):
        ArrowRows([twice], "name")


BYTES_AND_TEXTS = {
    "view": (pa.binary_view(), pa.string_view()),
    "list of a fixed size": (pa.list_(pa.binary(), 2), pa.list_(pa.string(), 2)),
    "view of a list": (pa.list_view(pa.binary()), pa.list_view(pa.string())),
    "map": (pa.map_(pa.string(), pa.binary()), pa.map_(pa.string(), pa.string())),
    "dictionary": (pa.dictionary(pa.int32(), pa.large_binary()), pa.dictionary(pa.int32(), pa.large_string())),
    "extension": (pa.opaque(pa.binary(), "picture", "vendor"), pa.json_()),
    "name": (pa.binary(16), pa.uuid()),
    "list of objects": (
        pa.list_(pa.struct([("path", pa.string()), ("bytes", pa.binary_view())])),
        pa.list_(pa.struct([("path", pa.string())])),
    ),
}


@pytest.mark.parametrize("name", BYTES_AND_TEXTS)
def test_bytes_are_left_out_of_whatever_type_and_texts_are_not(name: str) -> None:
    columns = [pa.nulls(1, kind) for kind in BYTES_AND_TEXTS[name]]
    assert ArrowRows([pa.RecordBatch.from_arrays(columns, names=["bytes", "texts"])], "name").columns == ("texts",)


UNHOLDABLE = {
    "bytes that are no text": pa.array([b"a", b"b", b"\xff"], pa.binary()).view(pa.string()),
    "a time after the year 9999": pa.array([0, 1, 4 * 10**17], pa.timestamp("us")),
    "a date after the year 9999": pa.array([0, 1, 4 * 10**6], pa.date32()),
}
"""Columns whose last value Python cannot hold."""


@pytest.mark.parametrize("name", UNHOLDABLE)
def test_a_value_that_python_cannot_hold_is_named_by_row_and_column(name: str) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(range(3)), UNHOLDABLE[name]], names=["a", "b"])
    rows = ArrowRows([table(2), batch], "name")
    assert len(rows.read(0, 4)) == 4
    for read in (lambda: rows.read(0, 5), lambda: rows[4]):
        with pytest.raises(UserError) as error:
            read()
        assert str(error.value).startswith("name, row 4: column 'b': ")
        assert "\n" not in str(error.value)


def test_several_files_are_one_after_the_other(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", b'\n{"a":0}\n{"a":1}\n')
    rows = Concatenated([first, ArrowRows([table(2)], "name"), lines(tmp_path / "b.jsonl", b'{"z":5}')])
    expected = [{"a": 0}, {"a": 1}, {"a": 0, "b": {"c": "x0"}}, {"a": 1, "b": {"c": "x1"}}, {"z": 5}]
    assert [rows[number] for number in range(len(rows))] == expected
    for begin in range(6):
        for end in range(begin, 6):
            assert list(rows.read(begin, end)) == expected[begin:end]
    assert [rows.location(number) for number in (1, 3, 4)] == [
        f"{tmp_path}/a.jsonl:3",
        "name, row 1",
        f"{tmp_path}/b.jsonl:1",
    ]
    assert rows.columns == ("a", "b", "z")


def test_batches_of_a_range(tmp_path: Path) -> None:
    rows = lines(tmp_path / "a.jsonl", b"".join(b'{"a":%d}\n' % number for number in range(2500)))
    ranges = list(batches(rows, 3, 2400))
    assert [(first, len(some)) for first, some in ranges] == [(3, 1024), (1027, 1024), (2051, 349)]
    assert [row["a"] for _, some in ranges for row in some] == list(range(3, 2400))


def test_a_dot_goes_into_an_object_unless_a_column_has_it() -> None:
    row = {"a": {"b": {"c": 1}}, "a.b": 2, "d": None}
    assert (value_of(row, "a.b.c"), value_of(row, "a.b"), value_of(row, "d")) == (1, 2, None)
    for column in ("a.x", "d.x", "x", "a.b.c.d"):
        with pytest.raises(KeyError):
            value_of(row, column)
    with pytest.raises(UserError) as error:
        needed(row, "x", "file:3")
    assert str(error.value) == "file:3: no column 'x', only 'a', 'a.b', 'd'"
    with pytest.raises(UserError, match="file:3: no column 'x', the row is empty"):
        needed({}, "x", "file:3")


def test_values_of_arrow_as_json_has_them() -> None:
    kinds = {
        "time": (datetime.datetime(2026, 1, 2, 3, 4), pa.timestamp("us"), "2026-01-02T03:04:00"),
        "date": (datetime.date(2026, 1, 2), pa.date32(), "2026-01-02"),
        "span": (datetime.timedelta(seconds=90), pa.duration("s"), 90.0),
        "exact": (decimal.Decimal("1.50"), pa.decimal128(5, 2), "1.50"),
        "map": ([("x", 1)], pa.map_(pa.string(), pa.int64()), {"x": 1}),
        "maps": ([[("x", 1)]], pa.list_(pa.map_(pa.string(), pa.int64())), [{"x": 1}]),
        "named": ("v", pa.dictionary(pa.int32(), pa.string()), "v"),
        "large": ("w", pa.large_string(), "w"),
        "nested": ({"d": datetime.date(2026, 1, 2)}, pa.struct([("d", pa.date32())]), {"d": "2026-01-02"}),
    }
    arrays = [pa.array([value], type=kind) for value, kind, _ in kinds.values()]
    [row] = ArrowRows([pa.RecordBatch.from_arrays(arrays, names=list(kinds))], "name").read(0, 1)
    assert row == {name: expected for name, (_, _, expected) in kinds.items()}
    assert json.loads(json.dumps(row)) == row
    assert plain(object) == str(object)
