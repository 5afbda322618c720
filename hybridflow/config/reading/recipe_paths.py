"""Explanation of a missing path in errors of a recipe.

A relative path starts from the directory where the command runs, whatever file the recipe is in; only `base`, by which
one recipe file names another, starts from the file that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hybridflow.data.files.config import FileSource
from hybridflow.rewards.config import FILES_OF_FUNCTIONS


def explained(line: str, settings: BaseModel) -> str:
    """An error of a recipe; where it is of a file that is missing, with what relative paths are relative to."""
    here = Path.cwd()
    missing = (path for path in _paths(settings) if path.is_relative_to(here) and str(path) in line)
    if any(not path.exists() for path in missing):
        return f"{line} (a relative path starts from {here}, where the command runs)"
    return line


def _paths(value: Any) -> Iterator[Path]:
    """Every path under a value of settings."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, str):
        file = value.rpartition(":")[0]
        if file.endswith(FILES_OF_FUNCTIONS):
            yield Path(file)
    elif isinstance(value, FileSource):
        yield from (Path(path) for path in value.path if "://" not in path)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths(getattr(value, name))
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _paths(item)
