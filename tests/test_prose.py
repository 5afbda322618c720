"""Words that name nothing are not there: CONTRIBUTING.md has the rules."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SOURCE = ("hybridflow", "engine3d", "launch")
_OTHER = ("tests", "benchmarks", "docs", "examples")
_OPENINGS = set(
    "What Of Whether How That Those With By For In From Where When Which Who Whose So As Have Let".split()  # noqa: SIM905
)
_NAMES = set(
    "found each place places part parts piece pieces own held whole wanted asked told tell facts figures room "  # noqa: SIM905
    "under_way go_on give_back take_back".split()
)
_DOCUMENTED = re.compile(r"^    ((?:\w+, )*\w+):(?: |$)", re.MULTILINE)


@dataclass(frozen=True)
class _Words:
    """The words of a module that are counted, each with its line.

    Args:
        openings: first words of docstrings.
        names: all that are bound: functions, classes, arguments, variables and attributes.
        classes: names of its classes.
        unknown: names in docstrings' lists of arguments that are none.
    """

    openings: tuple[tuple[int, str], ...]
    names: tuple[tuple[int, str], ...]
    classes: tuple[str, ...]
    unknown: tuple[tuple[int, str], ...]


@functools.cache
def _words(path: Path) -> _Words:
    openings, names, classes, unknown = [], [], [], []
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Module():
                openings += _openings_of(node.body)
            case ast.ClassDef():
                openings += _openings_of(node.body)
                names.append((node.lineno, node.name))
                classes.append(node.name)
                unknown += _unknown_arguments(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                openings += _openings_of(node.body[:1])
                names.append((node.lineno, node.name))
                unknown += _unknown_arguments(node)
            case ast.arg():
                names.append((node.lineno, node.arg))
            case ast.Name(name, ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name))
    return _Words(tuple(openings), tuple(names), tuple(classes), tuple(unknown))


def _openings_of(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Line and first word of a body's docstring and of those below its assignments."""
    for index, statement in enumerate(body):
        if index > 0 and not isinstance(body[index - 1], ast.Assign | ast.AnnAssign):
            continue
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.split():
            yield statement.lineno, value.value.split(maxsplit=1)[0]


def _unknown_arguments(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Line of a function or class, and names that its docstring lists as arguments but that it does not take."""
    _, _, after = (ast.get_docstring(node) or "").partition("\nArgs:\n")
    listed = re.split(r"^\S", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not (documented := _DOCUMENTED.findall(listed)):
        return
    takes = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    initial = [statement for statement in node.body if getattr(statement, "name", "") == "__init__"]
    for function in initial if isinstance(node, ast.ClassDef) else [node]:
        takes |= {inner.arg for inner in ast.walk(function) if isinstance(inner, ast.arg)}
    for names in documented:
        yield from ((node.lineno, name) for name in names.split(", ") if name not in takes)


def _modules(*folders: str) -> Iterator[tuple[str, _Words]]:
    for path in [path for folder in folders for path in sorted((_ROOT / folder).rglob("*.py"))]:
        yield path.relative_to(_ROOT).as_posix(), _words(path)


def _openings(*folders: str) -> list[str]:
    return [
        f"{name}:{line} {word}"
        for name, words in _modules(*folders)
        for line, word in words.openings
        if word.strip(".,:;`") in _OPENINGS
    ]


def _general_names(*folders: str) -> list[str]:
    return [
        f"{path}:{line} {name}"
        for path, words in _modules(*folders)
        for line, name in words.names
        if name.strip("_") in _NAMES
    ]


@pytest.mark.slow
def test_docstrings_begin_with_their_object_or_an_imperative() -> None:
    assert _openings(*_SOURCE, *_OTHER) == []


def test_docstrings_list_arguments_that_there_are() -> None:
    unknown = [f"{path}:{line} {name}" for path, words in _modules(*_SOURCE, *_OTHER) for line, name in words.unknown]
    assert unknown == []


def test_names_say_what_the_thing_is() -> None:
    assert _general_names(*_SOURCE, *_OTHER) == []


def test_a_class_name_stands_in_one_module() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for path, words in _modules(*_SOURCE):
        for name in words.classes:
            modules[name].add(path)
    assert {name: sorted(paths) for name, paths in modules.items() if len(paths) > 1} == {}
