"""Pydantic's errors as one line each: where it was read, which key, which value, what would be accepted."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Key = tuple[str | int, ...]

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text (put a number in quotes to make it text)",
    "list": "a list",
    "tuple": "a list",
    "set": "a list without repeats",
    "dict": "keys and values",
    "path": "a path",
    "none": "null",
}


def describe_errors(
    settings: type[BaseModel], data: object, error: ValidationError, places: Mapping[Key, str], source: str
) -> list[str]:
    """One line for every key that is wrong, in the order of the errors.

    Args:
        settings: the class that was validated.
        data: what it was validated from.
        error: what pydantic found.
        places: where each key was read (`file:line`, or the override).
        source: the place of keys that are nowhere in `places`.
    """
    wrong: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        wrong.setdefault(_real_key(data, detail), []).append(detail)
    return [_line(settings, key, details, _place(key, places, source)) for key, details in wrong.items()]


def _line(settings: type[BaseModel], key: Key, details: list[ErrorDetails], place: str) -> str:
    name = ".".join(map(str, key))
    first = details[0]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place}: unknown key {name}: {_suggestion(settings, key)}"
    if first["type"] == "missing":
        return f"{place}: {name} is missing and has no default"
    if first["type"] in ("value_error", "assertion_error"):
        reason = str(first.get("ctx", {}).get("error") or first["msg"])
        return f"{place}: {f'{name}: ' if name else ''}{' '.join(reason.split())}"
    expected = " or ".join(dict.fromkeys(_expected(settings, key, detail) for detail in details))
    return f"{place}: {name} = {_short(first['input'])}: expected {expected}"


def _expected(settings: type[BaseModel], key: Key, detail: ErrorDetails) -> str:
    """What pydantic would have accepted, in the words of a person who edits a recipe."""
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "literal_error" | "enum":
            several = " or " in context["expected"]
            return f"one of {context['expected']}" if several else context["expected"]
        case "greater_than":
            return f"more than {context['gt']}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than":
            return f"less than {context['lt']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "model_type" | "model_attributes_type" | "dataclass_type":
            return f"the keys {', '.join(_keys_at(settings, key))}"
    words = _EXPECTED.get(kind.split("_")[0])
    return words or detail["msg"][:1].lower() + detail["msg"][1:]


def _suggestion(settings: type[BaseModel], key: Key) -> str:
    known = _keys_at(settings, key[:-1])
    near = difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {'.'.join(map(str, (*key[:-1], near[0])))}?"
    group = ".".join(map(str, key[:-1]))
    return f"{group or 'the top level'} takes {', '.join(known)}"


def _keys_at(settings: type[BaseModel], key: Key) -> list[str]:
    """The keys that the group at `key` takes."""
    return list(dict.fromkeys(name for group in _groups_at(settings, key) for name in _fields(group)))


def _groups_at(settings: Any, key: Key) -> Iterator[Any]:
    """The classes that can stand at `key`: several where an annotation is a union."""
    if not key:
        yield from _classes(settings)
        return
    for group in _classes(settings):
        field = _fields(group).get(str(key[0]))
        if field is not None:
            yield from _groups_at(field, key[1:])
    for item in _item_types(settings):
        yield from _groups_at(item, key[1:])


def _fields(group: Any) -> dict[str, Any]:
    """Name and annotation of each key of a settings class or dataclass."""
    if issubclass(group, BaseModel):
        return {name: field.annotation for name, field in group.model_fields.items()}
    hints = typing.get_type_hints(group)
    return {field.name: hints[field.name] for field in dataclasses.fields(group)}


def _classes(annotation: Any) -> Iterator[Any]:
    """The classes with fields in an annotation: itself, or the members of a union."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from _classes(part)


def _item_types(annotation: Any) -> Iterator[Any]:
    """What a list or mapping in an annotation holds."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        for part in parts:
            yield from _item_types(part)
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        yield parts[1]
    elif origin in (list, tuple, set, frozenset):
        yield parts[0]


def _real_key(data: object, detail: ErrorDetails) -> Key:
    """The key as the file has it: pydantic adds the name of each member of a union that it tried."""
    key: list[str | int] = []
    for index, part in enumerate(detail["loc"]):
        last = index == len(detail["loc"]) - 1
        if isinstance(data, Mapping) and (part in data or (last and detail["type"] == "missing")):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        key.append(part)
    return tuple(key)


def _place(key: Key, places: Mapping[Key, str], source: str) -> str:
    """Where a key was read, or else what is below it, or else the group around it."""
    if key and key not in places:
        below = (place for inner, place in places.items() if inner[: len(key)] == key)
        around = (places[key[:length]] for length in range(len(key) - 1, 0, -1) if key[:length] in places)
        return next(below, None) or next(around, source)
    return places.get(key, source)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
