"""The runs in the directory of a run of several actors."""

from __future__ import annotations

from pathlib import Path

from hybridflow.rundir.file_names import RECIPE


def runs_in(directory: Path) -> list[Path]:
    """The directory of each actor's run, by name; the directory itself where it is a run, or holds none."""
    if (directory / RECIPE).exists() or not directory.is_dir():
        return [directory]
    return sorted(path.parent for path in directory.glob(f"*/{RECIPE}")) or [directory]
