"""Commands that train.

`hybridflow train` runs a recipe, `hybridflow resume` continues a run after its newest checkpoint by the recipe that is
kept in its directory, and `hybridflow replay` makes a step of a run again from its checkpoint and its samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.checkpoint.manifest import MANIFEST, find_checkpoints
from engine3d.errors import DamagedCheckpointError, UserError
from engine3d.startup.imports import quick_imports
from hybridflow.cli import actors
from hybridflow.cli.common.outcome import fail, guarded, last_words
from hybridflow.cli.common.recipe_arguments import (
    add_recipe,
    check_cluster,
    checked_recipes,
    several_actors_launched,
)
from hybridflow.cluster.driver_link import driver_link
from hybridflow.cluster.hosts.checks.host_check import check_open_files
from hybridflow.cluster.processes.termination import termination
from hybridflow.config.reading.yaml_loader import parse_override, settings_yaml
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.file_names import CHECKPOINTS, RECIPE
from hybridflow.rundir.kept_recipe import saved_to
from hybridflow.rundir.run_record import started_from

if TYPE_CHECKING:
    from hybridflow.trainer.replaying.plan import ReplayPlan

_GIVEN = ("name", "run_dir", "resume", "overwrite")
"""Settings that the run's directory gives."""
DIFFERENT = 3
"""The exit code where a step is not what it was."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow train`."""
    add_recipe(parser)
    parser.add_argument(
        "--again",
        action="store_true",
        help="continue this run if it has begun, whatever the recipe says of resume: for what starts runs again",
    )


def train(parsed: argparse.Namespace) -> int:
    """Run `hybridflow train`.

    Raises:
        UserError: something is wrong with the recipe or this machine; nothing has begun.
    """
    from hybridflow.trainer import closing

    began = time.monotonic()
    print(f"checking {parsed.recipe}", flush=True)
    actors.end_with_parent()
    recipes = checked_recipes(parsed, starts=True, here=True)
    print(f"checked in {time.monotonic() - began:.1f} s", flush=True)
    if len(recipes) > 1 and driver_link() is not None:
        raise several_actors_launched(parsed)
    if len(recipes) > 1:
        return guarded(lambda: actors.train(recipes, parsed.words))
    recipe = next(iter(recipes.values()))
    termination.grace_s = recipe.limits.stop_s
    if code := check_cluster(recipe):
        return code

    damaged: list[Path] = []

    def work() -> int:
        with quick_imports():
            from hybridflow.trainer.run import train as train_recipe

        try:
            train_recipe(recipe)
        except DamagedCheckpointError as error:
            damaged.extend([] if error.checkpoint is None else [error.checkpoint])
            raise
        return 0

    def has_begun() -> bool:
        return closing.has_begun(recipe.directory, settings_yaml(recipe))

    def tell_how_to_resume() -> None:
        if has_begun():
            lines = closing.how_to_resume(
                recipe.directory, recipe.checkpoint, recipe.checkpoint_directory, parsed.words, *damaged
            )
            print("\n".join(lines), file=sys.stderr, flush=True)

    def say_what_it_failed_of() -> None:
        assert termination.cause is not None
        if termination.cause.code == 1:
            last_words.note(termination.cause.line)
            note_directory()
            last_words.say()

    def note_directory() -> None:
        last_words.directory = recipe.directory if has_begun() else None

    termination.last_words = say_what_it_failed_of
    termination.add_resort(note_directory)
    termination.add_resort(tell_how_to_resume)  # after Ctrl-C it stands below the line that says so
    try:
        code = guarded(work)
    except UserError as error:
        code = fail(error, 1)
    termination.remove_resort(tell_how_to_resume)
    if code:
        note_directory()
        tell_how_to_resume()
    return code


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow resume`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as trainer.steps=200")


def resume(parsed: argparse.Namespace) -> int:
    """Run `hybridflow resume`.

    Raises:
        UserError: it is no run's directory, or has no checkpoint; or something is wrong with the recipe.
    """
    directory = _resumable(parsed.run)
    for text in parsed.overrides:
        if (name := str(parse_override(text).key[0])) in _GIVEN:
            raise UserError(f"resume: {name} is that of the run in {parsed.run}, expected none of it")
    where = [f"name={json.dumps(directory.name)}", f"run_dir={json.dumps(str(directory.parent))}"]
    parsed.recipe, parsed.actor, parsed.track_metrics = str(parsed.run / RECIPE), None, False
    parsed.overrides = [*parsed.overrides, *where, "overwrite=false", "resume=auto"]
    parsed.words = [parsed.recipe, *parsed.overrides]
    return train(parsed)


def _resumable(run: Path) -> Path:
    """The absolute path of a run's directory. Raises UserError where there is nothing to resume."""
    if not (run / RECIPE).is_file():
        if (runs := runs_in(run)) != [run]:
            names = ", ".join(run.name for run in runs)
            raise UserError(
                f"resume: {run} has the runs of several actors ({names}), which continue together: expected "
                "hybridflow train RECIPE resume=auto"
            )
        raise UserError(f"resume: no run in {run} (it has no {RECIPE}); expected a run's directory such as runs/demo")
    saved = saved_to(run)
    complete, skipped = find_checkpoints(saved) if saved is not None else ([], [])
    # The run reports one that is damaged; a save that was killed leaves no manifest.
    is_damaged = any((incomplete.directory / MANIFEST).exists() for incomplete in skipped)
    if not complete and not is_damaged and started_from(run, saved or run / CHECKPOINTS) is None:
        raise UserError(
            f"resume: the run in {run} has saved no checkpoint; checkpoint.save_interval=10 saves every ten steps"
        )
    return run.absolute()


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow replay`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as train.layout.tp=2")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step that is made again")
    parser.epilog = (
        "Ends with 0 where weights and figures are the same bits, or within the tolerance where other settings, "
        f"software or hardware make other bits; with {DIFFERENT} where they are not."
    )


def replay(parsed: argparse.Namespace) -> int:
    """Run `hybridflow replay`.

    Raises:
        UserError: the step cannot be made again; nothing has begun.
    """
    actors.end_with_parent()
    check_open_files()
    if parsed.step < 1:
        raise UserError(f"--step {parsed.step}: expected at least 1")
    with quick_imports():
        from hybridflow.planning.checks.recipe import check_recipe
        from hybridflow.trainer.replaying.plan import plan_replay

    plan = plan_replay(parsed.run, parsed.step, parsed.overrides)
    for line in [*check_recipe(plan.recipe), *plan.lines()]:
        print(line, flush=True)
    termination.grace_s = plan.recipe.limits.stop_s
    if code := check_cluster(plan.recipe):
        return code
    try:
        return guarded(lambda: _replay(plan))
    except UserError as error:
        return fail(error, 1)


def _replay(plan: ReplayPlan) -> int:
    with quick_imports():
        from hybridflow.trainer.replaying.replay import replay as replay_step

    verdict = replay_step(plan)
    print("\n".join(verdict.lines()), flush=True)
    return 0 if verdict.as_expected else DIFFERENT
