"""Pydantic's errors as one line each: where it was read, which key, which value, what would be accepted."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engine3d.errors import shortened
from hybridflow.errors.redaction import redacted

Key = tuple[str | int, ...]

_ALIKE, _MOST_EDITS = 0.8, 2
"""Similarity of a key to the one that was meant, and edits between them, at most."""
_GROUP = ("model_type", "model_attributes_type", "dataclass_type")
"""Kinds of pydantic's errors about a value in place of a group."""
_MOST_ELSEWHERE = 3
_MOST_LEAVES = 3
_MOST_KEYS = 100
_DEEPEST = 6

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

_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', the first a letter or a digit",
}


def describe_errors(
    settings: type[BaseModel],
    data: object,
    error: ValidationError,
    locations: Mapping[Key, str],
    source: str,
    recipe: type[BaseModel] | None = None,
) -> list[str]:
    """One line for every key that is wrong, in the order of the errors.

    Args:
        settings: the class that was validated.
        data: what it was validated from.
        error: pydantic's.
        locations: of each key, as `file:line` or the override.
        source: the location of keys that `locations` lacks.
        recipe: settings that these stand for a part of, where an unknown key may belong.
    """
    wrong: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        wrong.setdefault(_real_key(data, detail), []).append(detail)
    for key in list(wrong):  # pydantic leaves wrong items out, and then misses them
        if any(inner[: len(key)] == key for inner in wrong if inner != key):
            wrong[key] = [detail for detail in wrong[key] if detail["type"] != "too_short"]
            if not wrong[key]:
                del wrong[key]
    return [_line(settings, key, details, _location(key, locations, source), recipe) for key, details in wrong.items()]


def _line(
    settings: type[BaseModel], key: Key, details: list[ErrorDetails], location: str, recipe: type[BaseModel] | None
) -> str:
    name = shortened(".".join(map(str, key)), 120)
    first = details[0]
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{location}: unknown key {name}: {suggestion(settings, key, first['input'], recipe)}"
    if first["type"] == "missing":
        return f"{location}: {name} is missing and has no default"
    if first["type"] in ("value_error", "assertion_error"):
        reason = str(first.get("ctx", {}).get("error") or first["msg"])
        return f"{location}: {f'{name}: ' if name else ''}{' '.join(reason.split())}"
    expected = " or ".join(dict.fromkeys(_expected(settings, key, detail) for detail in details))
    shown = shortened(repr(redacted(first["input"], key[-1] if key else "")))
    others: Mapping[str, str] = getattr(settings, "other_names", {})
    if isinstance(first["input"], Mapping) and (text := others.get(name)):
        leaves = itertools.islice(_texts_of_leaves(others, key, first["input"]), _MOST_LEAVES)
        return f"{location}: {name} is no group of settings: {'; '.join((text, *leaves))}"
    is_text = first["type"] in _GROUP and isinstance(first["input"], str)
    # Where a group has a name, a text is that name.
    if is_text and "name" not in _keys_at(settings, key) and (text := others.get(first["input"])):
        return f"{location}: {name} = {shown}: {text}"
    return f"{location}: {name} = {shown}: expected {expected}"


def _expected(settings: type[BaseModel], key: Key, detail: ErrorDetails) -> str:
    """Return what pydantic would have accepted, in words for an editor of recipes."""
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
        case "too_short":
            return f"at least {context['min_length']:,} item{'s' if context['min_length'] > 1 else ''}"
        case "too_long":
            return f"at most {context['max_length']:,} items"
        case "string_pattern_mismatch":
            return _PATTERNS.get(context["pattern"]) or f"text that matches {context['pattern']}"
        case "string_too_long":
            return f"at most {context['max_length']:,} characters"
        case "string_too_short":
            return f"at least {context['min_length']:,} character{'s' if context['min_length'] > 1 else ''}"
        case _ if kind in _GROUP:
            keys = _keys_at(settings, key)
            first = next((name for name in ("name", "path", "actor") if name in keys), None)
            if isinstance(detail["input"], str) and key and isinstance(key[-1], int) and "path" in keys:
                return f"keys and values, such as {{path: {shortened(detail['input'])}}}"
            if isinstance(detail["input"], str) and first:
                return f"a group of settings, such as {'.'.join(map(str, key))}.{first}={shortened(detail['input'])}"
            return f"the keys {', '.join(keys)}"
        case "list_type" | "tuple_type" if keys := _keys_at(settings, (*key, 0)):
            value = detail["input"]
            example = f"such as [{{path: {shortened(value)}}}], " if isinstance(value, str) and "path" in keys else ""
            return f"a list, {example}each item with keys of {', '.join(keys)}"
    words = _EXPECTED.get(kind.split("_")[0])
    return words or detail["msg"][:1].lower() + detail["msg"][1:]


def suggestion(settings: type[BaseModel], key: Key, value: object, recipe: type[BaseModel] | None) -> str:
    """Return what to write in place of an unknown key: its name here, the key it is a typo of, or the known keys."""
    others: Mapping[str, str] = getattr(settings, "other_names", {})
    name, group = str(key[-1]), ".".join(map(str, key[:-1]))
    known = _keys_at(settings, key[:-1])
    if value is None and re.fullmatch(r"[\w-]+:\S+", name):
        return f"expected a space behind the colon, as in {{{name.replace(':', ': ', 1)}}}"
    exact = _text_of(others, key, dotted=True)
    if exact is None and (near := _typo_of(_plain(name), known)):
        return f"did you mean {'.'.join(map(str, (*key[:-1], near)))}?"
    exact = exact or others.get(_plain(name))
    leaves = itertools.islice(_texts_of_leaves(others, key, value), _MOST_LEAVES)
    if texts := [*([exact] if exact else []), *leaves]:
        return "; ".join(texts)
    key = (*key[:-1], _plain(name))
    if paths := _elsewhere(settings, key):
        return f"here it is {' or '.join(paths)}"
    if recipe is not None and (paths := _elsewhere(recipe, key)):
        return f"here it is {' or '.join(paths)} of the recipe, as recipe={{...}}"
    return f"{group or 'the top level'} takes {', '.join(known)}"


def _typo_of(name: str, known: Sequence[str]) -> str | None:
    """The key that a name is a slip of the fingers away from; not one that is merely alike."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=_ALIKE)
    return next((candidate for candidate in near if _edits(name, candidate) <= _MOST_EDITS), None)


def _edits(one: str, other: str) -> int:
    """Characters to put in, take out or replace until one text is the other (Levenshtein's distance)."""
    row = list(range(len(other) + 1))
    for index, character in enumerate(one, start=1):
        above, row[0] = row[0], index
        for column, theirs in enumerate(other, start=1):
            above, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, above + (character != theirs))
    return row[-1]


def _plain(name: str) -> str:
    """A name of a command line's option as a key has it."""
    return name.lstrip("-").replace("-", "_")


def _texts_of_leaves(others: Mapping[str, str], key: Key, value: object, depth: int = 0) -> Iterator[str]:
    """Yield the texts of known names below an unknown key."""
    if not isinstance(value, Mapping) or depth == _DEEPEST:
        return
    for name, inner in itertools.islice(value.items(), _MOST_KEYS):
        below = (*key, str(name))
        dotted = ".".join(map(str, below))
        if isinstance(inner, Mapping):
            yield from _texts_of_leaves(others, below, inner, depth + 1)
        elif text := _text_of(others, below):
            yield f"{dotted}: {text}"


def _text_of(others: Mapping[str, str], key: Key, *, dotted: bool = False) -> str | None:
    """Return the text of the longest end of a key that has one, of one of several names alone if `dotted`."""
    for first in range(len(key) - (1 if dotted else 0)):
        if (text := others.get(".".join(_plain(str(name)) for name in key[first:]))) is not None:
            return text
    return None


def _elsewhere(settings: type[BaseModel], key: Key) -> list[str]:
    """The settings of the same name in other groups, where they are few: those below the key's own group first."""
    paths = list(dict.fromkeys(path for path in _paths(settings) if path[-1] == str(key[-1])))  # unions have some twice
    within = [path for path in paths if path[: len(key) - 1] == key[:-1]] if len(key) > 1 else []
    least = min((len(path) for path in within or paths), default=0)
    nearest = [".".join(path) for path in within or paths if len(path) == least]
    return nearest if len(nearest) <= _MOST_ELSEWHERE else []


def _paths(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The name of every setting, however deep; those in lists and under names of the user's are left out."""
    for model in _classes(group):
        for name, annotation in _fields(model).items():
            yield (*above, name)
            yield from _paths(annotation, (*above, name))


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
        for argument in typing.get_args(annotation):
            yield from _classes(argument)


def _item_types(annotation: Any) -> Iterator[Any]:
    """Yield the types of the items of a list or mapping in an annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        for argument in arguments:
            yield from _item_types(argument)
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        yield arguments[1]
    elif origin in (list, tuple, set, frozenset):
        yield arguments[0]


def _real_key(data: object, detail: ErrorDetails) -> Key:
    """The key as the file has it: pydantic adds the name of each member of a union that it tried."""
    key: list[str | int] = []
    for index, name in enumerate(detail["loc"]):
        last = index == len(detail["loc"]) - 1
        if isinstance(data, Mapping) and (name in data or (last and detail["type"] == "missing")):
            data = data.get(name)
        elif isinstance(data, list | tuple) and isinstance(name, int) and name < len(data):
            data = data[name]
        else:
            continue
        key.append(name)
    return tuple(key)


def _location(key: Key, locations: Mapping[Key, str], source: str) -> str:
    """Return the location of a key, or else of a key below it, or else of the group around it."""
    if key and key not in locations:
        below = (location for inner, location in locations.items() if inner[: len(key)] == key)
        around = (locations[key[:length]] for length in range(len(key) - 1, 0, -1) if key[:length] in locations)
        return next(below, None) or next(around, source)
    return locations.get(key, source)
