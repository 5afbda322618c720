"""The runs in the directory of a run of several actors."""

from __future__ import annotations

from pathlib import Path

from hybridflow.rundir.file_names import RECIPE


def runs_in(directory: Path) -> list[Path]:
    """The directory of each actor's run, by name; the directory itself where it is a run, or holds none."""
    if (directory / RECIPE).exists() or not directory.is_dir():
        return [directory]
    runs = {path.parent for path in directory.glob(f"*/{RECIPE}")}
    return sorted(path for path in runs if not _was_moved(path, runs)) or [directory]


def _was_moved(path: Path, runs: set[Path]) -> bool:
    """True if it is an earlier run of an actor, moved aside for one of the same name; see `lock.move_aside`."""
    name, dot, number = path.name.rpartition(".")
    return bool(dot) and number.isdecimal() and path.with_name(name) in runs
