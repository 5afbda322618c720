"""The recipe and the overrides that commands take, and the checks that it passes before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.startup.imports import quick_imports
from hybridflow.cli.common.outcome import guarded
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.driver_link import driver_link
from hybridflow.cluster.hosts.checks.host_check import check_open_files
from hybridflow.rundir.private import keep_private
from hybridflow.rundir.run_record import began_with
from hybridflow.rundir.status.lock import check_free

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe

_METRIC_SINKS = ("metrics.jsonl=true", "metrics.csv=true", "metrics.tensorboard=true")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that takes a recipe."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file such as launch/recipes/demo.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings, such as train.layout.tp=2 seed=1; resume=auto resumes from the newest checkpoint",
    )
    parser.add_argument("--actor", metavar="NAME", help="only this one of the recipe's actors")
    parser.add_argument(
        "--track_metrics", "--track-metrics", action="store_true", help="write metrics to JSONL, CSV and TensorBoard"
    )
    parser.epilog = "Relative paths, in the recipe too, start from the directory where the command runs."


def loaded_recipes(parsed: argparse.Namespace) -> dict[str, Recipe]:
    """The recipe, or that of each of its actors, as it is written; see `load_recipes`.

    Args:
        parsed: of `add_recipe`.

    Raises:
        UserError: a setting is wrong.
    """
    with quick_imports():
        from hybridflow.config.actors import load_recipes

    overrides = [*(_METRIC_SINKS if parsed.track_metrics else ()), *parsed.overrides]
    if _is_auto(parsed.recipe, overrides):
        overrides += _resolved(parsed, overrides)
    recipes = load_recipes(parsed.recipe, overrides, parsed.actor)
    if getattr(parsed, "again", False):
        recipes = {name: _continued(recipe) for name, recipe in recipes.items()}
    if any(recipe.private for recipe in recipes.values()):
        keep_private()  # before prompts are encoded into the cache
    return recipes


def _continued(recipe: Recipe) -> Recipe:
    """The recipe of a run that is continued if it has begun.

    A run that is to overwrite another, or to begin with a checkpoint, and has not begun, is as it is written.
    """
    is_named = recipe.resume not in ("none", "auto")
    if recipe.overwrite or (is_named and not began_with(recipe.directory, Path(recipe.resume))):
        return recipe
    return recipe.model_copy(update={"resume": "auto"})


def _is_auto(recipe: str, overrides: Sequence[str]) -> bool:
    """True if the placement or the actor's layout is left to the search; a file that cannot be read is not."""
    from hybridflow.config.reading.yaml_loader import SettingsError, read_with_overrides

    try:
        data = read_with_overrides(Path(recipe), overrides)[0]
    except SettingsError:
        return False  # and is refused where it is loaded
    train = data.get("train")
    return data.get("placement") == "auto" or (isinstance(train, dict) and train.get("layout") == "auto")


def _resolved(parsed: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Overrides in place of `auto`, on the nodes of the launch or of the command's options; prints what they are."""
    with quick_imports():
        from hybridflow.planning.search.auto import resolved

    nodes, link = None, driver_link()
    if link is not None:
        nodes = [host.node for host in link.hosts]
    elif getattr(parsed, "gpus_per_node", None) or isinstance(getattr(parsed, "nodes", None), int):
        count, gpus = parsed.nodes or 1, getattr(parsed, "gpus_per_node", None) or 8
        nodes = [Node(f"node {number}", gpus=gpus, cpu_slots=0) for number in range(count)]
    chosen, line = resolved(Path(parsed.recipe), overrides, nodes)
    print(line, flush=True)
    return chosen


def check_cluster(recipe: Recipe) -> int:
    """Check the nodes of a launch, or of the cluster that a recipe names. Return 0, or the exit code of a failure."""

    def check() -> int:
        with quick_imports():
            from hybridflow.trainer.startup.node_checks import check_nodes_of

        check_nodes_of(recipe)
        return 0

    link = driver_link()
    is_on_several = recipe.placement.cluster is not None or (link is not None and len(link.hosts) > 1)
    return guarded(check) if is_on_several else 0


def several_actors_launched(parsed: argparse.Namespace) -> UserError:
    """The error of a recipe of several actors that a launcher starts."""
    return UserError(f"{parsed.recipe}: several actors were tried on one machine alone, expected no launcher")


def check_name(directory: Path, resume: str | Path, *, overwrite: bool) -> None:
    """Refuse a run whose directory has another, unless it is to be resumed or overwritten.

    Raises:
        UserError: names what to write.
    """
    if resume == "none" and not overwrite:
        check_free(directory)


def checked_recipes(
    parsed: argparse.Namespace,
    nodes: Sequence[Node] | None = None,
    *,
    starts: bool = False,
    recipes: dict[str, Recipe] | None = None,
    **memory: Any,
) -> dict[str, Recipe]:
    """The recipe with nothing wrong in it, or that of each of its actors; see `load_recipes`.

    Args:
        parsed: of `add_recipe`.
        nodes: on which it is to run; this machine, or the hosts of the launch, if None.
        starts: it is to run now, so that no earlier run may have its directory.
        recipes: of `loaded_recipes`, if they are there already.
        memory: what `check_recipe` takes beside recipe and nodes.

    Raises:
        UserError: something is wrong with it.
    """
    check_open_files()
    link = driver_link()
    if link is not None:
        nodes = [host.node for host in link.hosts]
    recipes = loaded_recipes(parsed) if recipes is None else recipes
    for recipe in recipes.values() if starts else ():
        check_name(recipe.directory, recipe.resume, overwrite=recipe.overwrite)
    if len(recipes) > 1 and link is not None and len(link.hosts) > 1:
        raise several_actors_launched(parsed)

    with quick_imports():
        from hybridflow.planning.checks.recipe import check_actors, check_recipe

    one = next(iter(recipes.values()))
    warnings = check_recipe(one, nodes, **memory) if len(recipes) == 1 else check_actors(recipes, nodes, **memory)
    for warning in warnings:
        print(warning, flush=True)
    return recipes
