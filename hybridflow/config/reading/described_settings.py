"""Settings of a recipe, described by their models: type, default, bounds and meaning.

The pages of docs/configuration and `hybridflow settings` are made of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, Union

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hybridflow.algorithms.config import DEFAULT, load
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.recipe import Recipe

_MEANINGS = {
    "algorithm.name": "The algorithm: "
    + ", ".join(f"`{name}`" for name in ALGORITHMS)
    + "; or `file.py:ALGORITHM` of a [file of your own](adding_an_algorithm.md#in-a-file-of-your-own)."
}
"""Meanings of settings whose models cannot state them."""


@dataclass(frozen=True)
class Described:
    """A setting, or a group of settings.

    Args:
        path: its dotted name; `NAME` stands for a name of the user's, and `[]` for an index.
        type: its type as YAML has it, and its bounds, in Markdown; empty for a group.
        default: its default value, or a word about it.
        is_value: True if `default` is a value.
        meaning: what it is for.
    """

    path: str
    type: str
    default: str
    is_value: bool
    meaning: str


def described(path: str, model: type[BaseModel], name: str, field: FieldInfo, default: Any = None) -> Described:
    """A setting of a model.

    Args:
        path: its dotted name.
        model: the group that it is in.
        name: of the field in it.
        field: the field.
        default: the group's default, whose values may be others than those of its class.

    Raises:
        ValueError: nothing says what the setting is for.
    """
    value = default_of(model, name, field, default)
    text, is_value = ("required", False) if value is PydanticUndefined else (shown(value), True)
    if is_list(field.annotation) and model_of(field.annotation) is not None:
        if path.endswith("functions"):
            text, is_value = "the built-in task's", False
        elif value not in (None, PydanticUndefined):
            text, is_value = "none", False
    meaning = meaning_of(path, model, name, field)
    if not meaning:
        raise ValueError(f"{path} has no meaning: write one below it in {model.__module__}")
    return Described(path, type_of(field), text, is_value, meaning)


def inner_prefix(path: str) -> str:
    """Beginning of the names of a group's settings."""
    return {"functions": f"{path}[].", "evaluation": f"{path}.NAME."}.get(path.rpartition(".")[2], f"{path}.")


def all_settings() -> list[Described]:
    """Every setting and group of a recipe, each group before its settings."""
    return list(_walk("", Recipe, None))


def _walk(prefix: str, model: type[BaseModel], default: Any) -> Iterator[Described]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if path == "algorithm":
            yield Described(path, "", "", False, "The algorithm and its constants, by `algorithm.name`.")
            yield from _algorithm_settings()
        else:
            yield from _setting_or_group(path, model, name, field, default)


def _setting_or_group(
    path: str, model: type[BaseModel], name: str, field: FieldInfo, default: Any
) -> Iterator[Described]:
    group = model_of(field.annotation)
    if group is None:
        yield described(path, model, name, field, default)
        return
    if is_list(field.annotation):
        yield described(path, model, name, field, default)
    else:
        about = " ".join([*summary_of(group), meaning_of(path, model, name, field)]).strip()
        yield Described(path, "", "", False, about)
    yield from _walk(inner_prefix(path), group, default_of(model, name, field, default))


def _algorithm_settings() -> Iterator[Described]:
    """The settings of all algorithms, those of a few with their names."""
    users: dict[str, list[str]] = {}
    for algorithm in ALGORITHMS:
        for name in load(algorithm).settings.model_fields:
            users.setdefault(name, []).append(algorithm)
    shared = load(DEFAULT).settings.model_fields
    for name, algorithms in users.items():
        path, only = f"algorithm.{name}", ""
        model: type[BaseModel] = AlgorithmSettings
        if name in AlgorithmSettings.model_fields:
            field = shared[name] if model_of(shared[name].annotation) else model.model_fields[name]
        else:
            bases = (base for base in reversed(load(algorithms[-1]).settings.__mro__) if issubclass(base, BaseModel))
            model = next(base for base in bases if name in base.model_fields)  # which says what it is
            field, only = model.model_fields[name], f" Only with {' or '.join(algorithms)}."
        for setting in _setting_or_group(path, model, name, field, None):
            yield replace(setting, meaning=setting.meaning + only)


def default_of(model: type[BaseModel], name: str, field: FieldInfo, parent: Any) -> Any:
    """Return the default of a setting: its group's default for it, or else its class's."""
    if isinstance(parent, model):
        return getattr(parent, name)
    return field.get_default(call_default_factory=True)


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Path):
        return value.name  # it is made absolute when it is read
    return str(value)


def type_of(field: FieldInfo) -> str:
    """The type of a setting as YAML has it, and its bounds."""
    kinds = list(dict.fromkeys(_kinds(field.annotation)))
    bounds = list(_bounds([*field.metadata, *_inner_metadata(field.annotation)]))
    nullable = "null" in kinds
    text = ", ".join(["; ".join(kind for kind in kinds if kind != "null"), *bounds])
    return f"{text}; or null" if nullable else text


def _kinds(annotation: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _kinds(arguments[0])
    elif origin is Literal:
        yield " or ".join(f"`{choice}`" for choice in arguments)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _kinds(argument)
    elif origin in (tuple, list):
        yield "list" if model_of(arguments[0]) else f"list of {' or '.join(_kinds(arguments[0]))}"
    elif origin is dict:
        yield "mapping"
    else:
        names = {int: "integer", float: "number", bool: "boolean", str: "text", Path: "path", type(None): "null"}
        yield names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is Annotated:
        for metadata in typing.get_args(annotation)[1:]:
            yield from metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]
    elif typing.get_origin(annotation) in (Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _inner_metadata(argument)


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    words = (("Ge", "ge", "at least"), ("Gt", "gt", "above"), ("Le", "le", "at most"), ("Lt", "lt", "below"))
    for kind, name, word in words:
        for bound in metadata:
            if isinstance(bound, getattr(annotated_types, kind)):
                yield f"{word} {shown(getattr(bound, name))}"


@cache
def _docs(model: type[BaseModel]) -> dict[str, str]:
    """The texts below the settings of a class and of those that it derives from."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (isinstance(base, type) and issubclass(base, BaseModel)) or base is BaseModel:
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for setting, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name):
                texts.pop(setting.target.id, None)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    texts[setting.target.id] = " ".join(str(text.value.value).split())
    return texts


def meaning_of(path: str, model: type[BaseModel], name: str, field: FieldInfo) -> str:
    said = _MEANINGS.get(path) or field.description or _docs(model).get(name) or ""
    text = " ".join(said.split())
    name_of_a_type = text.startswith(("bf16", "float"))
    begin = text[:1] if name_of_a_type else text[:1].upper()
    return begin + text[1:] + ("" if not text or text.endswith(".") else ".")


def summary_of(model: type[BaseModel]) -> Iterator[str]:
    """Docstring of a class without the lines on each setting."""
    text = inspect.cleandoc(model.__doc__ or "").strip()
    yield " ".join(text.split())


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The class of the settings that a setting is a group of; None where it is no group."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, ForwardRef) or typing.get_origin(annotation) is Literal:
        return None
    return next((model for argument in typing.get_args(annotation) if (model := model_of(argument)) is not None), None)


def is_list(annotation: Any) -> bool:
    """True if a setting holds several groups: a list of them, or some by their names."""
    return typing.get_origin(annotation) in (tuple, list, dict)
