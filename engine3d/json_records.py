"""Dataclasses from JSON values, the first wrong field named in words of JSON."""

from __future__ import annotations

import functools
from errno import ENOENT
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from engine3d.errors import shortened
from engine3d.input_files import MOST_CONFIG_BYTES, FileError, JsonError, json_kind, read_json

EpochSeconds = Annotated[float, Field(ge=0, lt=1e11)]
"""Time in seconds since the epoch, of a year that calendars have."""

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    "sequence": "a list",
    "set": "a list",
    "dict": "an object",
    "mapping": "an object",
    "dataclass": "an object",
    "none": "null",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def record_of[T](kind: type[T], value: object) -> T:
    """Make a dataclass of a JSON value.

    Raises:
        JsonError: a field is missing, unknown, or of another type.
    """
    dataclass: Any = kind
    try:
        record: T = _adapter(dataclass).validate_python(value, extra="forbid")
    except ValidationError as error:
        raise JsonError(first_error(error)) from None
    return record


def read_record[T](path: Path, kind: type[T], most_bytes: int = MOST_CONFIG_BYTES) -> T | None:
    """Read a dataclass from a JSON file that this program has written; None where there is no such file.

    Raises:
        FileError: the file cannot be read, or is damaged.
    """
    try:
        return record_of(kind, read_json(path, most_bytes))
    except FileError as error:
        if error.errno == ENOENT:
            return None
        raise
    except JsonError as error:
        raise FileError(path, f"damaged: {error}") from None


def first_error(error: ValidationError, *above: str) -> str:
    """The first of the errors of a validation: field below `above`, expected value and value, in words of JSON."""
    first = error.errors(include_url=False)[0]
    name, kind, context = ".".join(map(str, (*above, *first["loc"]))), first["type"], first.get("ctx", {})
    if kind == "missing":
        return f"it has no {name}"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{shortened(name)} is no field of it"
    return f"{name}: {_reason(kind, context, first)}" if name else _reason(kind, context, first)


def _reason(kind: str, context: Any, first: Any) -> str:
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = f"{context[name]:,}" if isinstance(context[name], int) else f"{context[name]:g}"
        return f"expected {words} {bound}, found {shortened(repr(first['input']))}"
    if kind == "literal_error":
        return f"expected {context['expected']}, found {shortened(repr(first['input']))}"
    if kind == "string_unicode":
        return "expected a text without half characters"
    if (expected := _EXPECTED.get(kind.split("_")[0])) is not None:
        value = first["input"]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"expected {expected}, found {shortened(repr(value)) if is_number else json_kind(value)}"
    return str(first["msg"])


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
