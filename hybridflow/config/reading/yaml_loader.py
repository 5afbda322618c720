"""Settings from a YAML file and `key=value` overrides, with errors that name the location and the key.

Works for any `Settings` class. Numbers are read as people write them (`1e-3` is a number, `10_000` is ten thousand),
only `true` and `false` are booleans, and a key that stands twice is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_LEVELS, FileError, check_regular, json_kind
from engine3d.settings import Settings
from hybridflow.config.reading.error_messages import describe_errors
from hybridflow.errors.redaction import REDACTED, redacted, redacted_keys, redacted_override
from hybridflow.rundir.yaml_reader import Key, YamlError, parse_yaml, read_yaml_file

_MOST_BASES = 16
_WHOLE_LIST = "items of a list are not set one by one, expected the whole list"


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
    return build_settings(settings, *read_with_overrides(Path(path), overrides), str(path))


def read_with_overrides(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[Key, str]]:
    """Read a file and its bases, apply overrides in order, and return the location of each key too.

    Raises:
        SettingsError: as `read_with_bases`, `parse_override` and `apply_override`.
    """
    data, locations = read_with_bases(path)
    for text in overrides:
        override = parse_override(text)
        apply_override(data, override)
        locations = {key: location for key, location in locations.items() if key[: len(override.key)] != override.key}
        locations[override.key] = f"override {shortened(redacted_override(text))}"
    return data, locations


def build_settings[S: Settings](settings: type[S], data: dict[str, Any], locations: dict[Key, str], source: str) -> S:
    """Build the settings object of `data`. `locations` has where each key was read; `source` stands for all others.

    Raises:
        SettingsError: with one line for every error found.
    """
    if lacking := [".".join(map(str, key)) for key in redacted_keys(data)]:
        raise SettingsError([f"{source}: {name}: {REDACTED} stands for a secret; write it again" for name in lacking])
    try:
        return settings.model_validate(data)
    except ValidationError as error:
        raise SettingsError(describe_errors(settings, data, error, locations, source)) from None
    except UserError as error:  # raised by a class that checks itself, such as Layout
        raise SettingsError([f"{source}: {error}"]) from None


def parse_override(text: str) -> Override:
    """Split `dotted.key=value`.

    Raises:
        SettingsError: no `=`, an empty part in the key, or a value that is not YAML.
    """
    name, equals, value = text.partition("=")
    names = tuple(name.strip().split("."))
    shown = shortened(redacted_override(text))
    if not equals or not all(names) or len(names) > MOST_LEVELS:
        raise SettingsError([f"override {shown!r}: expected key=value, such as train.layout.tp=2"])
    if listed := re.match(r"([^\[\]]+)\[\d*\]", name):
        raise SettingsError([f"override {shown!r}: {_WHOLE_LIST}, as in {shortened(listed[1])}=[...]"])
    try:
        return Override(text, names, parse_yaml(value)[0])
    except YamlError as error:
        said = f"override {shown}: the value is not YAML"
        raise SettingsError([f"{said} ({error}): quote it, as in {shortened(name)}='\"...\"'"]) from None


def apply_override(data: dict[str, Any], override: Override) -> None:
    """Put the override's value into `data`, making the groups on its way.

    Raises:
        SettingsError: something on the way is a value, not a group of keys.
    """
    group = data
    for depth, name in enumerate(override.key[:-1], start=1):
        if group.get(str(name)) is None:
            group[str(name)] = {}
        group = group[str(name)]
        if not isinstance(group, dict):
            inner = ".".join(map(str, override.key[:depth]))
            where, value = shortened(redacted_override(override.text)), shortened(repr(redacted(group, name)))
            needed = f"{_WHOLE_LIST}, as in {inner}=[...]" if isinstance(group, list) else "which holds no keys"
            raise SettingsError([f"override {where}: {inner} is {value}, {needed}"])
    group[str(override.key[-1])] = override.value


def read_with_bases(path: Path, derived: Sequence[Path] = ()) -> tuple[dict[str, Any], dict[Key, str]]:
    """Read a file and its bases as `read_yaml` does.

    Args:
        derived: the files that led here.

    Raises:
        SettingsError: as `read_yaml`; also for files that are each other's base, and a base that is no path.
    """
    data, locations = read_yaml(path)
    if "base" not in data:
        return data, locations
    base, location = data.pop("base"), locations.pop(("base",))
    if not isinstance(base, str) or "\0" in base:
        raise SettingsError([f"{location}: base: {json.dumps(base)} is no path, expected another YAML file"])
    other = (path.parent / base).resolve()
    if other in (*derived, path.resolve()):
        raise SettingsError([f"{location}: base: {base} has this file as its own base"])
    if len(derived) == _MOST_BASES:
        raise SettingsError([f"{location}: base: a chain of more than {_MOST_BASES} files, expected fewer"])
    try:
        check_regular(other)
    except FileError as error:
        raise SettingsError([f"{location}: base: {error}"]) from None
    below, places_below = read_with_bases(other, (*derived, path.resolve()))
    return merged(below, data), places_below | locations


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge the keys of `above` into those of `below`."""
    both = {
        name: merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return below | both


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """Read the mapping in a YAML file, and the location of each key in it, as `file:line`.

    Raises:
        SettingsError: no such file, not YAML, a key that stands twice, or not a mapping.
    """
    if not path.exists():
        raise SettingsError([f"{path}: no such file; a recipe is a YAML file such as launch/recipes/demo.yaml"])
    if path.suffix == ".toml":
        raise SettingsError([f"{path}: a TOML file, expected a recipe in YAML, such as `hybridflow init` writes"])
    if path.is_dir():
        inner = path / "recipe.yaml"
        raise SettingsError([f"{path}: a directory, expected {inner if inner.is_file() else 'a recipe in YAML'}"])
    try:
        data, locations = read_yaml_file(path)
    except UserError as error:
        raise SettingsError([str(error)]) from None
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise SettingsError([f"{path}: expected keys and values, found {json_kind(data)}"])
    return data, locations


def settings_yaml(settings: Settings) -> str:
    """The settings as YAML with every default written out and without secrets.

    `load_settings` reads the same settings back, and asks for secrets that it lacks.
    """
    return yaml.safe_dump(public_settings(settings), sort_keys=False, allow_unicode=True, width=120)


def public_settings(settings: Settings) -> dict[str, Any]:
    """The settings as JSON has them, every default among them, without secrets."""
    public: dict[str, Any] = redacted(settings.model_dump(mode="json"))
    return public
