"""Rows of data files, read in place: lines of JSON by their offsets, Arrow tables mapped into memory."""

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
from hybridflow.data.files.conversations.messages import from_json
from hybridflow.data.files.formats.columns import TableColumns

BATCH = 1024
"""Rows that are read at a time."""

Row = Mapping[str, Any]
"""A row: values as JSON has them, by column; NaN, as pandas writes a missing number, is null."""


class Rows(Protocol):
    """Rows by their number, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row: ...

    def read(self, begin: int, end: int) -> Sequence[Row]:
        """The rows of a range."""
        ...

    def location(self, number: int) -> str:
        """Location of a row, for errors."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, from the file's schema; for lines of JSON those of the first rows."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of columns of bytes that are no text."""
        ...

    @property
    def in_columns(self) -> bool:
        """True if every row has every column, with null where it lacks one, and so do the objects in them."""
        ...


class JsonLines:
    """Rows of a file of one JSON object a line; lines of white space are skipped.

    Args:
        path: of the file, which is mapped into memory.
        name: of it in errors.
        is_list: true if the lines were made from another file, whose rows have no lines.

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
                f"{self.location(number)}: more than {MOST_LINE_BYTES:,} bytes in a line, expected at most that"
            )
        try:
            row = parse_json(
                self._data[begin:end], most_digits=MOST_DIGITS_OF_DATA, nan_is_null=True, unique_names=True
            )
        except JsonError as error:
            raise UserError(f"{self.location(number)}: not JSON ({error}), expected one object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{self.location(number)}: {json_kind(row)}, expected an object")
        return row

    def read(self, begin: int, end: int) -> Sequence[Row]:
        return [self[number] for number in range(begin, end)]

    def location(self, number: int) -> str:
        if self._is_list:
            return f"{self._name}, row {number}"
        blank = int(np.searchsorted(self._rows_before_blank, number, side="right"))
        return f"{self._name}:{number + blank + 1}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.read(0, min(len(self), 100)))))


def _line_offsets(data: mmap.mmap) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Offsets of the lines that are not white space, and numbers, from 0, of the lines that are."""
    size, block = len(data), 1 << 24
    offsets = [np.zeros(1, dtype=np.int64)]
    for begin in range(0, size, block):
        bytes_ = np.frombuffer(data, dtype=np.uint8, count=min(block, size - begin), offset=begin)
        offsets.append(np.flatnonzero(bytes_ == 0x0A) + (begin + 1))
        del bytes_  # else the map could not be closed
    begins = np.concatenate(offsets)
    if begins[-1] == size:
        begins = begins[:-1]
    everything = np.frombuffer(data, dtype=np.uint8)
    # Few lines begin with white space: only these are checked.
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
        self._columns = TableColumns.of(first.schema, first.column)
        self.columns, self.left_out = self._columns.names, self._columns.left_out

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        return self.read(number, number + 1)[0]

    def read(self, begin: int, end: int) -> Sequence[Row]:
        rows: list[Row] = []
        index = bisect.bisect_right(self._ends, begin)
        while begin < end:
            batch, last = self._batches[index], self._ends[index]
            first = last - len(batch)
            selected = batch.slice(begin - first, min(end, last) - begin).select(list(self.columns))
            for number, row in enumerate(self._values(selected, begin), start=begin):
                rows.append(self._columns.row(row, lambda number=number: self.location(number)))  # type: ignore[misc]
            begin, index = min(end, last), index + 1
        return rows

    def _values(self, batch: pa.RecordBatch, begin: int) -> list[dict[str, Any]]:
        """The values of rows, of which the first has number `begin`."""
        try:
            return batch.to_pylist()  # type: ignore[no-any-return]
        except (ValueError, OverflowError, pa.ArrowException):
            for number, column in itertools.product(range(len(batch)), self.columns):
                value = batch.column(column)[number]
                try:
                    value.as_py()
                except (ValueError, OverflowError, pa.ArrowException) as error:
                    reason = shortened(" ".join(str(error).split()), 120)
                    raise UserError(f"{self.location(begin + number)}: column {column!r}: {reason}") from None
            raise

    def location(self, number: int) -> str:
        return f"{self._name}, row {number}"


class Concatenated:
    """The rows of several files, one after the other."""

    def __init__(self, sections: Sequence[Rows]) -> None:
        self._sections = sections
        self._ends = list(itertools.accumulate(map(len, sections)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        section, inner = self._section(number)
        return section[inner]

    def read(self, begin: int, end: int) -> Sequence[Row]:
        rows: list[Row] = []
        while begin < end:
            index = bisect.bisect_right(self._ends, begin)
            first, last = self._ends[index] - len(self._sections[index]), min(end, self._ends[index])
            rows += self._sections[index].read(begin - first, last - first)
            begin = last
        return rows

    def location(self, number: int) -> str:
        section, inner = self._section(number)
        return section.location(inner)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(section.columns for section in self._sections)))

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(section.left_out for section in self._sections)))

    @property
    def in_columns(self) -> bool:
        return all(section.in_columns for section in self._sections)

    def _section(self, number: int) -> tuple[Rows, int]:
        index = bisect.bisect_right(self._ends, number)
        return self._sections[index], number - (self._ends[index] - len(self._sections[index]))


def batches(rows: Rows, begin: int, end: int) -> Iterator[tuple[int, Sequence[Row]]]:
    """Ranges of rows, each with the number of its first."""
    for first in range(begin, end, BATCH):
        yield first, rows.read(first, min(first + BATCH, end))


def value_of(row: Row, column: str) -> Any:
    """Value of a column. A dot goes into an object, or a text of one. Raises KeyError if the row lacks it."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = from_json(value)
        if not isinstance(value, Mapping):
            raise KeyError(column)
        value = value[key]
    return value


def has(row: Row, column: str) -> bool:
    """True if a row has a column."""
    try:
        value_of(row, column)
    except KeyError:
        return False
    return True


def needed(row: Row, column: str, location: str) -> Any:
    """Read a column as `value_of`. Raises UserError if the row lacks it."""
    try:
        return value_of(row, column)
    except KeyError:
        there = f"only {shortened(', '.join(map(repr, row)), 200)}" if row else "the row is empty"
        raise UserError(f"{location}: no column {column!r}, {there}") from None


def without_nulls(value: Any) -> Any:
    """Remove nulls from the objects in a value, at any depth: in Arrow all objects have the same fields."""
    if isinstance(value, Mapping):
        return {name: without_nulls(field_value) for name, field_value in value.items() if field_value is not None}
    return [without_nulls(element) for element in value] if isinstance(value, list) else value
