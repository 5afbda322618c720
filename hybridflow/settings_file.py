"""From a YAML file and `key=value` overrides to a frozen settings object, with errors that say where and what.

Works for any `Settings` class. Numbers are read as people write them (`1e-3` is a number, `10_000` is ten thousand),
only `true` and `false` are booleans, and a key that stands twice is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine3d.errors import UserError
from engine3d.settings import Settings
from hybridflow.settings_errors import describe_errors

Key = tuple[str | int, ...]


class SettingsError(UserError):
    """A file or its overrides are not what the settings class asks for.

    Args:
        lines: one line an error: where, which key, which value, what would be accepted.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of the command line."""

    text: str
    key: Key
    value: Any


def load_settings[S: Settings](settings: type[S], path: Path | str, overrides: Sequence[str] = ()) -> S:
    """Read `path`, apply `overrides` in order and check the result.

    Args:
        settings: the class to build.
        path: a YAML file with one mapping. `base: other.yaml` in it, relative to the file, stands for all that the
            other file says; the file's own keys come on top, key by key.
        overrides: `dotted.key=value`; the value is YAML, so `a.b=[1, 2]`, `a.b=null` and `a.b={c: 1}` work.

    Raises:
        SettingsError: with one line for every error found.
    """
    data, places = read_with_bases(Path(path))
    for text in overrides:
        override = parse_override(text)
        apply_override(data, override)
        places = {key: place for key, place in places.items() if key[: len(override.key)] != override.key}
        places[override.key] = f"override {text}"
    return build_settings(settings, data, places, str(path))


def build_settings[S: Settings](settings: type[S], data: dict[str, Any], places: dict[Key, str], source: str) -> S:
    """The settings object of `data`; `places` says where each key was read, `source` stands for all others.

    Raises:
        SettingsError: with one line for every error found.
    """
    try:
        return settings.model_validate(data)
    except ValidationError as error:
        raise SettingsError(describe_errors(settings, data, error, places, source)) from None
    except UserError as error:  # raised by a class that checks itself, such as Layout
        raise SettingsError([f"{source}: {error}"]) from None


def parse_override(text: str) -> Override:
    """Split `dotted.key=value`.

    Raises:
        SettingsError: no `=`, an empty part in the key, or a value that is not YAML.
    """
    name, equals, value = text.partition("=")
    parts = tuple(name.strip().split("."))
    if not equals or not all(parts):
        raise SettingsError([f"override {text!r}: expected key=value, such as train.layout.tp=2"])
    try:
        return Override(text, parts, yaml.load(value, Loader=_Loader))
    except yaml.YAMLError:
        raise SettingsError([f"override {text}: the value is not YAML: quote it, as in {name}='\"...\"'"]) from None


def apply_override(data: dict[str, Any], override: Override) -> None:
    """Put the override's value into `data`, making the groups on its way.

    Raises:
        SettingsError: something on the way is a value, not a group of keys.
    """
    group = data
    for depth, part in enumerate(override.key[:-1], start=1):
        if group.get(str(part)) is None:
            group[str(part)] = {}
        group = group[str(part)]
        if not isinstance(group, dict):
            inner = ".".join(map(str, override.key[:depth]))
            raise SettingsError([f"override {override.text}: {inner} is {group!r}, which holds no keys"])
    group[str(override.key[-1])] = override.value


def read_with_bases(path: Path, derived: Sequence[Path] = ()) -> tuple[dict[str, Any], dict[Key, str]]:
    """What `read_yaml` reads of a file and of its bases.

    Args:
        derived: the files that led here.

    Raises:
        SettingsError: as `read_yaml`; also for files that are each other's base, and a base that is no path.
    """
    data, places = read_yaml(path)
    if "base" not in data:
        return data, places
    base, place = data.pop("base"), places.pop(("base",))
    if not isinstance(base, str):
        raise SettingsError([f"{place}: base: {base!r} is no path, expected another YAML file"])
    other = (path.parent / base).resolve()
    if not other.is_file():
        raise SettingsError([f"{place}: base: there is no file {other}"])
    if other in (*derived, path.resolve()):
        raise SettingsError([f"{place}: base: {base} has this file as its own base"])
    below, places_below = read_with_bases(other, (*derived, path.resolve()))
    return _merged(below, data), places_below | places


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return below | both


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """The mapping in a YAML file, and for each key in it the place, as `file:line`.

    Raises:
        SettingsError: no such file, not YAML, a key that stands twice, or not a mapping.
    """
    if not path.is_file():
        raise SettingsError([f"{path}: no such file; a recipe is a YAML file such as launch/recipes/demo.yaml"])
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        places = dict(_places(node, str(path))) if node else {}
        data = loader.construct_document(node) if node else {}
    except UnicodeDecodeError:
        raise SettingsError([f"{path}: not a text file in UTF-8"]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError([f"{path}:{line}: {error.problem or 'not YAML'}"]) from None
    except yaml.YAMLError as error:
        raise SettingsError([f"{path}: not YAML: {str(error).splitlines()[0]}"]) from None
    if not isinstance(data, dict):
        raise SettingsError([f"{path}: expected keys and values, found {type(data).__name__}"])
    return data, places


def settings_yaml(settings: Settings) -> str:
    """The settings as YAML with every default written out; `load_settings` reads the same settings back."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _places(node: yaml.Node, path: str, key: Key = ()) -> list[tuple[Key, str]]:
    """Key and `file:line` of everything under a node."""
    found: list[tuple[Key, str]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(name.value, name.start_mark.line, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value.start_mark.line, value) for index, value in enumerate(node.value)]
    else:
        return found
    for name, line, value in children:
        found.append(((*key, name), f"{path}:{line + 1}"))
        found.extend(_places(value, path, (*key, name)))
    return found


class _Loader(yaml.SafeLoader):
    """YAML as of version 1.2: no octal by a leading zero, no base 60, no yes and no, and 1e-3 is a number."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for name, _ in node.value:
            if name.value in seen:
                problem = f"the key {name.value} stands twice, also on line {seen[name.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, name.start_mark)
            seen[name.value] = name.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), [*"~nN", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9][0-9_]*$"), [*"-+0123456789"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"((?=[-+]?\.?[0-9])[-+]?([0-9][0-9_]*)?(\.[0-9_]*|(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN))$"
    ),
    [*"-+.0123456789"],
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
