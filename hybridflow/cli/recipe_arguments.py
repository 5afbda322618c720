"""The recipe and the overrides that commands take, and the checks that it passes before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine3d.startup.imports import quick_imports
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.hosts.checks.host_check import check_open_files
from hybridflow.cluster.hosts.driver_link import driver_link

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
        help="settings, such as train.layout.tp=2 seed=1; resume=auto goes on after the newest checkpoint",
    )
    parser.add_argument("--track_metrics", action="store_true", help="write metrics to JSONL, CSV and TensorBoard")
    parser.epilog = "Relative paths, in the recipe too, start from the directory where the command runs."


def checked_recipe(parsed: argparse.Namespace, nodes: Sequence[Node] | None = None, **memory: Any) -> Recipe:
    """The recipe with nothing wrong in it.

    Args:
        parsed: of `add_recipe`.
        nodes: on which it is to run; this machine, or the hosts of the launch, if None.
        memory: what `check_recipe` takes beside recipe and nodes.

    Raises:
        UserError: something is wrong with it.
    """
    check_open_files()
    link = driver_link()
    if link is not None:
        nodes = [Node(host.name, host.gpus, host.cpu_slots, host.role) for host in link.cluster.hosts]
    with quick_imports():
        from hybridflow.config.recipe import load_recipe

    overrides = [*(_METRIC_SINKS if parsed.track_metrics else ()), *parsed.overrides]
    recipe = load_recipe(parsed.recipe, overrides)

    with quick_imports():
        from hybridflow.planning.recipe_check import check_recipe

    for warning in check_recipe(recipe, nodes, **memory):
        print(warning, flush=True)
    if link is not None:
        from hybridflow.planning.shared_disk import check_shared_disks

        check_shared_disks(recipe, link.cluster.hosts, link.apart)
    return recipe
