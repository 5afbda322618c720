"""Modules of algorithms in files of the user, under names by which any process imports them.

Settings and functions of such a file are sent to other processes by the name of their module, which holds the path of
the file. This module is the package that they are in.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__path__: list[str] = []
_PREFIX = "file_"


def is_own(name: str) -> bool:
    """True for "some/file.py:NAME"."""
    file, _, attribute = name.rpartition(":")
    return file.endswith(".py") and attribute.isidentifier()


def absolute(name: str) -> str:
    """Return the name with the path of its file absolute."""
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{attribute}"


def file_of(name: str) -> Path:
    """Return the file of an algorithm."""
    return Path(name.rpartition(":")[0])


def own_source(settings: Mapping[str, Any]) -> str | None:
    """Return the text of the file that a recipe, as it was read, has its algorithm from; None where it has it from
    none.
    """
    algorithm = settings.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    if not isinstance(name, str) or not is_own(name):
        return None
    path = file_of(absolute(name))
    return path.read_text(errors="replace") if path.is_file() else f"no file {path}"


def load_own(name: str) -> Any:
    """Import what "some/file.py:NAME" names.

    Raises:
        ValueError: the file is not there, cannot be imported, or has no such name.
    """
    path, attribute = file_of(absolute(name)), name.rpartition(":")[2]
    if not path.is_file():
        raise ValueError(f"{path}: no such file, expected one with the algorithm as {attribute}")
    module = f"{__name__}.{_PREFIX}{str(path).encode().hex()}"
    try:
        imported = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the file raises
        raise ValueError(f"{path} cannot be imported: {_described(error, path)}") from None
    if not hasattr(imported, attribute):
        raise ValueError(f"{path} has no {attribute!r}, expected {attribute} = Algorithm(...) in it")
    return getattr(imported, attribute)


def _described(error: BaseException, path: Path) -> str:
    """Describe an error by its type, line in the file and message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    in_line = f" in line {line}" if line else ""
    message = " ".join(str(error).split())[:300]
    message = "".join(letter if letter.isprintable() else "?" for letter in message)
    return f"{type(error).__name__}{in_line}: {message}"


class _Finder(MetaPathFinder):
    """Finds the files of modules in this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__ or not name.startswith(_PREFIX):
            return None
        file = Path(bytes.fromhex(name.removeprefix(_PREFIX)).decode())
        if not file.is_file():
            raise ModuleNotFoundError(f"the algorithm's file {file} is not there on this host", name=fullname)
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.insert(0, _Finder())  # before one that refuses unknown modules of this package
