"""A reader for the YAML of recipes that has bounds: of size, depth, values with aliases written out, and digits.

YAML as of version 1.2: no octal by a leading zero, no base 60, no yes and no, and 1e-3 is a number. Only what a recipe
needs: keys are plain texts, and values have no tags.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_DIGITS, MOST_LEVELS, read_text

Key = tuple[str | int, ...]

MOST_BYTES = 256 << 10
"""Largest size of a file: a recipe with every default has 10 kB, and Python's YAML takes a second for 100 kB."""
MOST_VALUES = 10_000
"""Most values of a file, with aliases written out."""


class YamlError(UserError):
    """Text is not YAML as it is read here. The message is the reason.

    Args:
        line: counted from 1, where it is known.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(shortened(" ".join(reason.split()), 200))
        self.line = line


def read_yaml_file(path: Path) -> tuple[Any, dict[Key, str]]:
    """The value in a YAML file, None if it is empty; and for each key in it the place, as `file:line`.

    Raises:
        UserError: it cannot be read, or is not YAML; names the file, and the line.
    """
    try:
        return parse_yaml(read_text(path, MOST_BYTES), str(path))
    except YamlError as error:
        where = f"{path}:{error.line}: " if error.line is not None else f"{path}: not YAML: "
        raise UserError(f"{where}{error}") from None


def parse_yaml(text: str, source: str = "") -> tuple[Any, dict[Key, str]]:
    """The value in YAML text, None if it is empty; and for each key in it the place, as `source:line`.

    Raises:
        YamlError: it is not YAML, or more of it than is read.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_locations(node, source))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(error.problem or "not YAML", mark.line + 1 if mark else 1) from None
    except (yaml.YAMLError, ValueError) as error:  # of an escape that is no character
        raise YamlError(str(error).splitlines()[0]) from None


def _locations(node: yaml.Node, path: str, key: Key = ()) -> list[tuple[Key, str]]:
    """Key and `file:line` of everything under a node."""
    locations: list[tuple[Key, str]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(name.value, name.start_mark.line, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value.start_mark.line, value) for index, value in enumerate(node.value)]
    else:
        return locations
    for name, line, value in children:
        locations.append(((*key, name), f"{path}:{line + 1}"))
        locations.extend(_locations(value, path, (*key, name)))
    return locations


class _Loader(yaml.SafeLoader):
    """One text. Refuses what is too much while it is read, before any value is made."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = self._values = 0
        self._sizes: dict[str, int | None] = {}
        """Values of each anchor, None while it is read."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            size = self._sizes.get(str(event.anchor), 0)
            if size is None:
                raise _refused(f"*{event.anchor} stands inside itself", event)
            self._count(size, event)
            return super().compose_node(parent, index)
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refused(f"the tag {event.tag!r}, expected a value without one", event)
        before = self._values
        self._count(1, event)
        if event.anchor is not None:
            self._sizes[event.anchor] = None
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise _refused(f"nested more than {MOST_LEVELS} levels deep", event)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._values - before
        return node

    def _count(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise _refused(f"more than {MOST_VALUES:,} values with aliases written out, expected at most that", event)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                kind = "list" if isinstance(name, yaml.SequenceNode) else "group of keys"
                raise _refused(f"a {kind} as a key, expected a name", name)
            if name.value in seen:
                raise _refused(f"the key {name.value} stands twice, also on line {seen[name.value]}", name)
            seen[name.value] = name.start_mark.line + 1
            if name.tag != "tag:yaml.org,2002:merge":
                name.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _refused(problem: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, where.start_mark)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = loader.construct_scalar(node).replace("_", "")
    if len(digits) > MOST_DIGITS:
        raise _refused(f"a whole number has {len(digits):,} digits, expected at most {MOST_DIGITS}", node)
    return int(digits)


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
