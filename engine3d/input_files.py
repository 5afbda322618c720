"""Text and JSON files that a user names, read with bounds: a regular file, of a size, without depth or length to abuse.

Opening a named pipe waits for ever, a device has no end, and JSON of a few kilobytes can hold a number or a depth that
Python refuses late, or in the middle of other work. Every file of a user is read here: each of these is one error.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened

MOST_LEVELS = 64
"""Levels of lists and objects inside each other."""
MOST_DIGITS = 40
"""Digits of a whole number: transformers writes `model_max_length` with 31."""
MOST_DIGITS_OF_DATA = 4000
"""Digits of a whole number in data, where one may be the answer to a problem."""
_MIB = 1 << 20
MOST_CONFIG_BYTES = 16 * _MIB
MOST_LIST_BYTES = 64 * _MIB
"""Bytes of a file that lists tensors or files: 400,000 of them."""
MOST_LINE_BYTES = 16 * _MIB
AS_UTF8 = "`iconv -f LATIN1 -t UTF-8 FILE > NEW` converts text in Latin-1"
"""Advice where a file is in another encoding, which its bytes do not name."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class FileError(UserError):
    """A file cannot be read. The message names it, and says why.

    Args:
        path: the file.
        reason: why, to follow its name.
        number: `errno` of the system's error; None where it is another.
    """

    def __init__(self, path: Path | str, reason: str, number: int | None = None) -> None:
        super().__init__(f"{_printable(path)}: {reason}")
        self.reason, self.errno = reason, number


class JsonError(ValueError):
    """Text is not the JSON that can be read here. The message says why, and where in the text if that is known."""


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; the caller closes it. Never waits.

    Raises:
        FileError: no such file, another kind of file, or one that may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        linked = "a link to a file that does not exist" if path.is_symlink() else "no such file"
        raise FileError(path, linked, errno.ENOENT) from None
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}", error.errno) from None
    except ValueError:
        raise FileError(path, "a null character is in the path") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FileError(path, f"is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, expected a regular file")
    return descriptor


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Check that a library without limits of its own can read a file.

    Raises:
        FileError: as `open_regular`, or it has more than `most_bytes`.
    """
    descriptor = open_regular(path)
    try:
        _check_size(path, os.fstat(descriptor).st_size, most_bytes)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        FileError: as `open_regular`, or it has more than `most_bytes`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        _check_size(path, os.fstat(file.fileno()).st_size, most_bytes)
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise FileError(path, f"cannot be read: {error.strerror}") from None
    _check_size(path, len(data), most_bytes)  # it may have grown
    return data


def read_text(path: Path, most_bytes: int) -> str:
    """The content of a regular file of UTF-8 text. Errors as of `read_bytes`, and FileError for other bytes."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(path, "not a text file in UTF-8") from None


def read_json(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> Any:
    """The value in a regular file of JSON.

    Raises:
        FileError: as `read_text`, or it is not JSON that `parse_json` reads.
    """
    try:
        return parse_json(read_text(path, most_bytes))
    except JsonError as error:
        raise FileError(path, f"not valid JSON: {error}") from None


def read_json_object(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a regular file of JSON. Errors as of `read_json`, and FileError for another value."""
    values = read_json(path, most_bytes)
    if not isinstance(values, dict):
        raise FileError(path, f"expected a JSON object, found {json_kind(values)}")
    return values


def json_kind(value: Any) -> str:
    """The kind of a JSON value, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), "a number")


def json_text(value: Any, most: int = 60) -> str:
    """A value of data as JSON writes it, a text in single quotes, shortened to `most` characters."""
    if isinstance(value, str):
        return shortened(repr(value), most)
    return shortened(json.dumps(value, ensure_ascii=False, default=repr), most)


def parse_json(
    text: str | bytes, *, most_digits: int = MOST_DIGITS, nan_is_null: bool = False, unique_names: bool = False
) -> Any:
    """The value of JSON text that nests at most `MOST_LEVELS` deep.

    Args:
        text: if bytes, in UTF-8.
        most_digits: of a whole number.
        nan_is_null: read NaN, which JSON does not have and Python writes, as null.
        unique_names: refuse objects that have a name twice, of which the last would count.

    Raises:
        JsonError: it is something else.
    """

    def integer(digits: str) -> int:
        if len(digits) > most_digits:
            raise JsonError(f"a whole number has {len(digits):,} digits, expected at most {most_digits:,}")
        return int(digits)

    def constant(name: str) -> float | None:
        return None if nan_is_null and name == "NaN" else float(name)

    try:
        pairs_hook = _unique if unique_names else None
        value = json.loads(text, parse_int=integer, parse_constant=constant, object_pairs_hook=pairs_hook)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise JsonError("it is empty") from None
        if isinstance(text, str) and text.startswith("\ufeff"):
            raise JsonError("it begins with a byte-order mark, expected UTF-8 without one") from None
        raise JsonError(_syntax_error(error)) from None
    except UnicodeDecodeError:
        raise JsonError(f"not text in UTF-8; {AS_UTF8}") from None
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    _check_depth(value)
    return value


_SYNTAX = {
    "Expecting value": "no JSON value",
    "Expecting property name enclosed in double quotes": "no name in double quotes",
    "Expecting ',' delimiter": "no comma",
    "Expecting ':' delimiter": "no colon",
    "Unterminated string starting at": "a text without an end",
    "Invalid control character at": "a control character",
    "Invalid \\escape": "a backslash that escapes nothing",
    "Invalid \\uXXXX escape": "\\u without four hexadecimal digits",
    "Extra data": "more text after the value",
}


def _syntax_error(error: json.JSONDecodeError) -> str:
    """Fault and its place: the line of a text that has several, and the column."""
    line = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
    words = _SYNTAX.get(error.msg.removesuffix(": "), error.msg)
    return f"{words} at {line}column {error.colno}"


def lines(path: Path, *, most_line_bytes: int = MOST_LINE_BYTES, errors: str = "strict") -> Iterator[tuple[str, bool]]:
    """The lines of a regular file of UTF-8 text, without their ends, one at a time.

    Args:
        path: the file.
        most_line_bytes: of one line.
        errors: what is done with bytes that are not UTF-8, as for `bytes.decode`.

    Yields:
        A line, and whether it has an end: the last may lack one.

    Raises:
        FileError: as `open_regular`, a line is longer, or is no text.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        for number in itertools.count(1):
            try:
                line = file.readline(most_line_bytes + 1)
                text = line.decode("utf-8", errors)
            except OSError as error:
                raise FileError(path, f"cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise FileError(f"{path}:{number}", f"not text in UTF-8; {AS_UTF8}") from None
            if not line:
                return
            if len(line) > most_line_bytes:
                raise FileError(
                    f"{path}:{number}", f"a line of more bytes than {most_line_bytes:,}, expected at most that"
                )
            if number == 1:
                text = text.removeprefix("\ufeff")  # some editors put this mark of the byte order there
            yield text.removesuffix("\n"), text.endswith("\n")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"{twice!r} is in an object twice")
    return unique


_TOO_DEEP = f"nested more than {MOST_LEVELS} levels deep"


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level:
        depth += 1
        if depth > MOST_LEVELS:
            raise JsonError(_TOO_DEEP)
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def _check_size(path: Path, size: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size > most_bytes:
        raise FileError(path, f"{size:,} bytes, expected at most {most_bytes:,}")


def _printable(path: Path | str) -> str:
    return str(path).replace("\0", "\\0")


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read a HuggingFace model's config.json. The fields of `text_config` are merged into it."""
    config = read_json_object(directory / "config.json")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def is_file_name(name: str) -> bool:
    """True if a name that somebody else wrote is that of a file in a directory, and leads nowhere else."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
