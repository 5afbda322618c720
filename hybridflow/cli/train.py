"""`hybridflow train`: runs a recipe."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.errors import DamagedCheckpointError, UserError
from engine3d.startup.imports import quick_imports
from hybridflow.cli import actors
from hybridflow.cli.last_words import last_words
from hybridflow.cli.outcome import fail, guarded
from hybridflow.cli.recipe_arguments import checked_recipes, several_actors_launched
from hybridflow.cluster.hosts.driver_link import driver_link
from hybridflow.cluster.processes.termination import termination

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe


def run(parsed: argparse.Namespace) -> int:
    """The command.

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
    if recipe.placement.cluster is not None and (code := guarded(lambda: _check_cluster(recipe))):
        return code

    damaged: list[Path] = []

    def work() -> int:
        try:
            return _run_recipe(recipe)
        except DamagedCheckpointError as error:
            damaged.extend([] if error.checkpoint is None else [error.checkpoint])
            raise

    def tell_how_to_go_on() -> None:
        if lines := closing.how_to_go_on(recipe, parsed.words, *damaged):
            print("\n".join(lines), file=sys.stderr, flush=True)

    def say_what_it_failed_of() -> None:
        assert termination.cause is not None
        if termination.cause.code == 1:
            last_words.note(termination.cause.line)
            note_directory()
            last_words.say()

    def note_directory() -> None:
        last_words.directory = recipe.directory if closing.has_begun(recipe) else None

    termination.last_words = say_what_it_failed_of
    termination.add_resort(note_directory)
    termination.add_resort(tell_how_to_go_on)  # after Ctrl-C it stands below the line that says so
    try:
        code = guarded(work)
    except UserError as error:
        code = fail(error, 1)
    termination.remove_resort(tell_how_to_go_on)
    if code:
        note_directory()
        tell_how_to_go_on()
    return code


def _check_cluster(recipe: Recipe) -> int:
    from hybridflow.trainer.attached_cluster import check_cluster_of

    check_cluster_of(recipe)
    return 0


def _run_recipe(recipe: Recipe) -> int:
    with quick_imports():
        from hybridflow.trainer.trainer import train

    train(recipe)
    return 0
