"""Rows of data files, read where they lie: lines of JSON by their offsets, Arrow tables mapped into memory."""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_DIGITS_OF_DATA, MOST_LINE_BYTES, JsonError, json_kind, open_regular, parse_json
from engine3d.startup.lazy_imports import pa
from hybridflow.data.files.columns import Columns
from hybridflow.data.files.messages import from_json

BATCH = 1024
"""Rows that are read at a time where all are."""

Row = Mapping[str, Any]
"""A row: values as JSON has them, by column; NaN, as pandas writes a missing number, is null."""


class Rows(Protocol):
    """Rows by their number, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row: ...

    def read(self, begin: int, end: int) -> Sequence[Row]:
        """The rows of a range."""
        ...

    def place(self, number: int) -> str:
        """Where a row is, for errors."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names, where the file itself says them; of lines of JSON those of the first rows."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of columns of bytes that are no text."""
        ...

    @property
    def in_columns(self) -> bool:
        """Whether every row has every column, null where it lacks one, and so do the objects in them."""
        ...


class JsonLines:
    """Rows of a file of one JSON object a line; lines of white space are skipped.

    Args:
        path: of the file, which is mapped into memory.
        name: of it in errors.
        is_list: whether the lines were made of another file, in which rows have no lines.

    Raises:
        UserError: there is no such file, or it holds no row.
    """

    in_columns = False
    left_out = ()

    def __init__(self, path: Path, name: str | None = None, *, is_list: bool = False) -> None:
        self._name, self._is_list = name or str(path), is_list
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            if not size:
                raise UserError(f"{self._name} is empty, expected one JSON object a line")
            self._data = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._begins, blank = _line_offsets(self._data)
        self._rows_before_blank = blank - np.arange(len(blank))
        if not len(self._begins):
            raise UserError(f"{self._name} holds no rows, expected one JSON object a line")

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int) -> Row:
        begin = int(self._begins[number])
        end = self._data.find(b"\n", begin)
        end = len(self._data) if end < 0 else end
        if end - begin > MOST_LINE_BYTES:
            raise UserError(
                f"{self.place(number)}: more than {MOST_LINE_BYTES:,} bytes in a line, expected at most that"
            )
        try:
            row = parse_json(
                self._data[begin:end], most_digits=MOST_DIGITS_OF_DATA, nan_is_null=True, unique_names=True
            )
        except JsonError as error:
            raise UserError(f"{self.place(number)}: not JSON ({error}), expected one object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{self.place(number)}: {json_kind(row)}, expected an object")
        return row

    def read(self, begin: int, end: int) -> Sequence[Row]:
        return [self[number] for number in range(begin, end)]

    def place(self, number: int) -> str:
        if self._is_list:
            return f"{self._name}, row {number}"
        blank = int(np.searchsorted(self._rows_before_blank, number, side="right"))
        return f"{self._name}:{number + blank + 1}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.read(0, min(len(self), 100)))))


def _line_offsets(data: mmap.mmap) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each line begins that is not white space, and the numbers, from 0, of the lines that are."""
    size, block = len(data), 1 << 24
    found = [np.zeros(1, dtype=np.int64)]
    for begin in range(0, size, block):
        bytes_ = np.frombuffer(data, dtype=np.uint8, count=min(block, size - begin), offset=begin)
        found.append(np.flatnonzero(bytes_ == 0x0A) + (begin + 1))
        del bytes_  # else the map could not be closed
    begins = np.concatenate(found)
    if begins[-1] == size:
        begins = begins[:-1]
    everything = np.frombuffer(data, dtype=np.uint8)
    # Few lines begin with white space: these alone are looked at.
    suspects = np.flatnonzero(np.isin(everything[begins], list(b" \t\r\n\x0b\x0c")))
    del everything
    blank = []
    for line in suspects.tolist():
        end = data.find(b"\n", int(begins[line]))
        if not data[int(begins[line]) : size if end < 0 else end].strip():
            blank.append(line)
    return np.delete(begins, blank) if blank else begins, np.array(blank, dtype=np.int64)


class ArrowRows:
    """Rows of Arrow record batches, which lie in files that are mapped into memory.

    Args:
        batches: all of one schema.
        name: of the file in errors.
    """

    in_columns = True

    def __init__(self, batches: Sequence[pa.RecordBatch], name: str) -> None:
        if not sum(map(len, batches)):
            raise UserError(f"{name} holds no rows")
        self._batches = [batch for batch in batches if len(batch)]
        self._ends = list(itertools.accumulate(map(len, self._batches)))
        self._name = name
        names = self._batches[0].schema.names
        if twice := next((column for column in names if names.count(column) > 1), None):
            raise UserError(f"{name}: there are two columns named {twice!r}, expected each name once")
        first = self._batches[0]
        self._columns = Columns.of(first.schema, first.column)
        self.columns, self.left_out = self._columns.names, self._columns.left_out

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        return self.read(number, number + 1)[0]

    def read(self, begin: int, end: int) -> Sequence[Row]:
        rows: list[Row] = []
        place = bisect.bisect_right(self._ends, begin)
        while begin < end:
            batch, last = self._batches[place], self._ends[place]
            first = last - len(batch)
            part = batch.slice(begin - first, min(end, last) - begin).select(list(self.columns))
            for number, row in enumerate(self._values(part, begin), start=begin):
                rows.append(self._columns.row(row, lambda number=number: self.place(number)))  # type: ignore[misc]
            begin, place = min(end, last), place + 1
        return rows

    def _values(self, part: pa.RecordBatch, begin: int) -> list[dict[str, Any]]:
        """The values of rows, of which the first has number `begin`."""
        try:
            return part.to_pylist()  # type: ignore[no-any-return]
        except (ValueError, OverflowError, pa.ArrowException):
            for number, column in itertools.product(range(len(part)), self.columns):
                value = part.column(column)[number]
                try:
                    value.as_py()
                except (ValueError, OverflowError, pa.ArrowException) as error:
                    reason = shortened(" ".join(str(error).split()), 120)
                    raise UserError(f"{self.place(begin + number)}: column {column!r}: {reason}") from None
            raise

    def place(self, number: int) -> str:
        return f"{self._name}, row {number}"


class Concatenated:
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        part, inner = self._part(number)
        return part[inner]

    def read(self, begin: int, end: int) -> Sequence[Row]:
        rows: list[Row] = []
        while begin < end:
            place = bisect.bisect_right(self._ends, begin)
            first, last = self._ends[place] - len(self._parts[place]), min(end, self._ends[place])
            rows += self._parts[place].read(begin - first, last - first)
            begin = last
        return rows

    def place(self, number: int) -> str:
        part, inner = self._part(number)
        return part.place(inner)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(part.columns for part in self._parts)))

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(part.left_out for part in self._parts)))

    @property
    def in_columns(self) -> bool:
        return all(part.in_columns for part in self._parts)

    def _part(self, number: int) -> tuple[Rows, int]:
        place = bisect.bisect_right(self._ends, number)
        return self._parts[place], number - (self._ends[place] - len(self._parts[place]))


def batches(rows: Rows, begin: int, end: int) -> Iterator[tuple[int, Sequence[Row]]]:
    """Ranges of rows, each with the number of its first."""
    for first in range(begin, end, BATCH):
        yield first, rows.read(first, min(first + BATCH, end))


def value_of(row: Row, column: str) -> Any:
    """The value of a column; a dot goes into an object, or a text of one. Raises KeyError where the row lacks it."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = from_json(value)
        if not isinstance(value, Mapping):
            raise KeyError(column)
        value = value[part]
    return value


def has(row: Row, column: str) -> bool:
    """True if a row has a column."""
    try:
        value_of(row, column)
    except KeyError:
        return False
    return True


def needed(row: Row, column: str, place: str) -> Any:
    """As `value_of`. Raises UserError where the row lacks the column."""
    try:
        return value_of(row, column)
    except KeyError:
        there = f"only {shortened(', '.join(map(repr, row)), 200)}" if row else "the row is empty"
        raise UserError(f"{place}: no column {column!r}, {there}") from None


def without_nulls(value: Any) -> Any:
    """A value without what is null in its objects, at any depth: of Arrow, where all objects have the same fields."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
