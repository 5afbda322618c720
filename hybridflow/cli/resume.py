"""`hybridflow resume`: continues a run after its newest checkpoint, by the recipe that is kept in its directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine3d.checkpoint.manifest import MANIFEST, find_checkpoints
from engine3d.errors import UserError
from hybridflow.cli import train
from hybridflow.config.yaml_loader import parse_override
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.file_names import CHECKPOINTS, RECIPE
from hybridflow.rundir.kept_recipe import saved_to
from hybridflow.rundir.run_record import started_from

_GIVEN = ("name", "run_dir", "resume", "overwrite")
"""Settings that the run's directory gives."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as trainer.steps=200")


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, or has no checkpoint; or something is wrong with the recipe.
    """
    directory = _checked(parsed.run)
    for text in parsed.overrides:
        if (name := str(parse_override(text).key[0])) in _GIVEN:
            raise UserError(f"resume: {name} is that of the run in {parsed.run}, expected none of it")
    where = [f"name={json.dumps(directory.name)}", f"run_dir={json.dumps(str(directory.parent))}"]
    parsed.recipe, parsed.actor, parsed.track_metrics = str(parsed.run / RECIPE), None, False
    parsed.overrides = [*parsed.overrides, *where, "overwrite=false", "resume=auto"]
    parsed.words = [parsed.recipe, *parsed.overrides]
    return train.run(parsed)


def _checked(run: Path) -> Path:
    """The absolute path of a run's directory. Raises UserError where there is nothing to resume."""
    if not (run / RECIPE).is_file():
        if (runs := runs_in(run)) != [run]:
            names = ", ".join(each.name for each in runs)
            raise UserError(
                f"resume: {run} has the runs of several actors ({names}), which go on together: expected "
                "hybridflow train RECIPE resume=auto"
            )
        raise UserError(f"resume: no run in {run} (it has no {RECIPE}); expected a run's directory such as runs/demo")
    saved = saved_to(run)
    whole, skipped = find_checkpoints(saved) if saved is not None else ([], [])
    # One that is damaged is told by the run; a save that was killed leaves no manifest.
    is_damaged = any((each.directory / MANIFEST).exists() for each in skipped)
    if not whole and not is_damaged and started_from(run, saved or run / CHECKPOINTS) is None:
        raise UserError(
            f"resume: the run in {run} has saved no checkpoint; checkpoint.save_interval=10 saves every ten steps"
        )
    return run.absolute()
