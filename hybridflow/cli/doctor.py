"""`hybridflow doctor`: checks this host, or the nodes of a running Ray cluster, and the recipe there, before a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine3d.errors import UserError
from engine3d.startup.imports import quick_imports
from hybridflow.cli import agent
from hybridflow.cli.recipe_arguments import checked_recipes
from hybridflow.cluster.hosts.launch.launch_plan import CAN_START, CANNOT_START
from hybridflow.cluster.hosts.network.network_settings import check_used
from hybridflow.config.yaml_loader import read_with_overrides


def run(parsed: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        UserError: something is wrong with which a run would fail. The last line says that it cannot start.
        EngineError: a node of the cluster does not answer.
    """
    placement = read_with_overrides(Path(parsed.recipe), parsed.overrides)[0].get("placement")
    if not isinstance(placement, dict) or placement.get("cluster") is None:
        options = [f"--actor={parsed.actor}"] if parsed.actor is not None else []
        words = ["doctor", parsed.recipe, *parsed.overrides, *options]
        return agent.take_part(agent.Launched(0, 1, agent.LOOPBACK, 0, words))
    try:
        _check_cluster(parsed)
    except UserError as error:
        raise UserError(f"{error}\n{CANNOT_START}") from None
    print(CAN_START, flush=True)
    return 0


def _check_cluster(parsed: argparse.Namespace) -> None:
    recipes = checked_recipes(parsed)
    with quick_imports():
        from hybridflow.trainer.attached_cluster import doctor

    recipe = next(iter(recipes.values()))  # several actors are refused with a cluster
    check_used(recipe.network, 1, recipe.placement.cluster)
    doctor(recipe)
