"""Directories that are the runs of actors."""

from __future__ import annotations

from pathlib import Path

from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.status.lock import move_aside


def test_runs_that_made_way_for_others_are_no_actors(tmp_path: Path) -> None:
    for name in ("adder", "brief", "v0.1"):
        for _ in range(2):
            if (tmp_path / name).exists():
                move_aside(tmp_path / name)
            (tmp_path / name).mkdir()
            (tmp_path / name / "recipe.yaml").touch()
    assert [path.name for path in runs_in(tmp_path)] == ["adder", "brief", "v0.1"]
