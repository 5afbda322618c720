"""A judge's answer as a number: a JSON object by a schema, or free text by a pattern."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import jsonschema

from engine3d.errors import shortened


class MalformedError(Exception):
    """A judge's answer that is no verdict."""


class Scale:
    """Number of a verdict: its position in a range, from 0 to 1, or its entry in a table.

    Args:
        ends: of the range.
        choices: the table.

    Raises:
        ValueError: not exactly one of both is given, or it is of no use.
    """

    def __init__(self, ends: tuple[float, float] | None, choices: Mapping[str, float] | None) -> None:
        if (ends is None) == (choices is None):
            raise ValueError("expected one of score_range, such as [1, 10], and choices, such as {good: 1, bad: 0}")
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(f"score_range: {list(ends)}, expected the lower end first")
        if choices is not None and len(choices) < 2:
            raise ValueError(f"choices: {dict(choices)}, expected at least two")
        self._ends, self._choices = ends, choices

    def schema(self) -> dict[str, Any]:
        """The schema of the field that holds the verdict."""
        if self._choices is not None:
            return {"type": "string", "enum": list(self._choices)}
        assert self._ends is not None
        return {"type": "number", "minimum": self._ends[0], "maximum": self._ends[1]}

    @property
    def types(self) -> tuple[str, ...]:
        """JSON Schema's types of the verdict."""
        return ("string",) if self._choices is not None else ("number", "integer")

    def value(self, given: object) -> float:
        """The number. Raises MalformedError where what is given is not on the scale."""
        if self._choices is not None:
            if isinstance(given, str) and given in self._choices:
                return self._choices[given]
            raise MalformedError(f"{_quoted(given)} is none of {', '.join(self._choices)}")
        assert self._ends is not None
        low, high = self._ends
        if isinstance(given, bool) or not isinstance(given, int | float) or not low <= given <= high:
            raise MalformedError(f"{_quoted(given)} is no number of {low:g} to {high:g}")
        return (given - low) / (high - low)


class StructuredVerdict:
    """A JSON object, of which a field is the score.

    Args:
        field: its name.
        scale: of the score.
        schema: of the object, in JSON Schema; one that has this field alone if None.

    Raises:
        ValueError: the schema is none, or does not ask for the field.
    """

    def __init__(self, field: str, scale: Scale, schema: Mapping[str, Any] | None) -> None:
        self._field, self._scale = field, scale
        if schema is None:
            schema = {
                "type": "object",
                "properties": {field: scale.schema()},
                "required": [field],
                "additionalProperties": False,
            }
        kind = jsonschema.Draft202012Validator
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            key = ".".join(map(str, error.absolute_path))
            raise ValueError(f"json_schema: {key + ': ' if key else ''}{shortened(error.message, 200)}") from None
        properties = schema.get("properties", {})
        if schema.get("type") != "object" or field not in properties or field not in schema.get("required", ()):
            raise ValueError(
                f"json_schema: expected type object, with score_field {field!r} in properties and required"
            )
        self._schema = dict(schema)
        self._validator = kind(schema)
        try:
            list(self._validator.iter_errors(dict.fromkeys(properties)))
        except Exception as error:  # such as a reference to nothing
            raise ValueError(f"json_schema: {shortened(' '.join(str(error).split()), 200)}") from None
        given = properties[field].get("type", scale.types) if isinstance(properties[field], Mapping) else scale.types
        kinds = [given] if isinstance(given, str) else given
        if not set(scale.types) & set(kinds):
            raise ValueError(f"json_schema: {field!r} is a {' or '.join(kinds)}, expected a {scale.types[0]}")

    def request(self) -> dict[str, Any]:
        """Fields of a request that set the form of its answer."""
        named = {"name": "verdict", "schema": self._schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def score(self, text: str) -> float:
        """The number that an answer stands for. Raises MalformedError."""
        try:
            verdict = json.loads(text)
        except (ValueError, RecursionError):
            raise MalformedError(f"{_quoted(text)} is no JSON") from None
        try:
            error = next(self._validator.iter_errors(verdict), None)
        except Exception as failed:  # such as a reference to nothing, deep in the schema
            raise MalformedError(f"the schema cannot be held against it: {shortened(str(failed), 100)}") from None
        if error is not None:
            raise MalformedError(f"{_quoted(text)} is not of the schema: {shortened(error.message, 100)}")
        return self._scale.value(verdict[self._field])


class WrittenVerdict:
    """A text, of which the last match of a regular expression is the score: its first group, if it has one.

    Args:
        pattern: of Python.
        scale: of the score.

    Raises:
        ValueError: it is no regular expression.
    """

    def __init__(self, pattern: str, scale: Scale) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern: {pattern!r} is no regular expression: {error}") from None
        self._numbers = scale.schema()["type"] == "number"
        self._scale = scale

    def request(self) -> dict[str, Any]:
        """Fields of a request that set the form of its answer: none."""
        return {}

    def score(self, text: str) -> float:
        """The number that an answer stands for. Raises MalformedError."""
        last = next(iter(deque(self._pattern.finditer(text), maxlen=1)), None)
        if last is None:
            raise MalformedError(f"{_quoted(text[-60:])} at the end, and no match of the pattern")
        given: str | float | None = last[1] if self._pattern.groups else last[0]
        if self._numbers:
            try:
                given = float(given or "")
            except ValueError:
                raise MalformedError(f"{_quoted(given)} is no number") from None
            if not math.isfinite(given):
                raise MalformedError(f"{given} is no number")
        return self._scale.value(given)


def _quoted(given: object) -> str:
    return shortened(repr(given), 80)
