"""The recipe in a run's directory as YAML reads it, not as settings: one of an earlier version can be looked at too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.input_files import json_kind
from hybridflow.rundir.file_names import CHECKPOINTS, RECIPE
from hybridflow.rundir.yaml_reader import read_yaml_file


def read_kept_recipe(run: Path) -> dict[str, Any]:
    """The recipe of a run.

    Raises:
        UserError: it cannot be read, or is no mapping.
    """
    recipe, _ = read_yaml_file(run / RECIPE)
    if not isinstance(recipe, dict):
        raise UserError(f"{run / RECIPE}: expected keys and values, found {json_kind(recipe)}")
    return recipe


def kept_setting(recipe: Mapping[str, Any], dotted: str) -> Any:
    """A setting such as "train.layout"; None where the recipe does not say."""
    value: Any = recipe
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def saved_to(run: Path) -> Path | None:
    """Return the directory of a run's checkpoints: where its recipe says, or in the run's directory, wherever that was
    moved to.

    A run that was continued with another `checkpoint.dir` has older ones in its own directory. None of a run that keeps
    none, and of a directory that is no run's.

    Raises:
        UserError: its recipe cannot be read.
    """
    default = run / CHECKPOINTS
    named = kept_setting(read_kept_recipe(run), "checkpoint.dir") if (run / RECIPE).is_file() else None
    elsewhere = Path(named).absolute() if isinstance(named, str) else None
    if default.is_dir() and not (elsewhere is not None and elsewhere.is_dir()):
        return default
    return elsewhere
