"""`hybridflow doctor`: says what this host is, or the nodes of a Ray cluster that is there, before a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine3d.startup.imports import quick_imports
from hybridflow.cli import agent
from hybridflow.cluster.hosts.network.network_settings import check_used
from hybridflow.config.yaml_loader import read_with_overrides


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: something is wrong with which a run would fail.
        EngineError: a node of the cluster does not answer.
    """
    placement = read_with_overrides(Path(parsed.recipe), parsed.overrides)[0].get("placement")
    if not isinstance(placement, dict) or placement.get("cluster") is None:
        words = ["doctor", parsed.recipe, *parsed.overrides]
        return agent.take_part(agent.Launched(0, 1, agent.LOOPBACK, 0, words))
    with quick_imports():
        from hybridflow.config.actors import load_one_recipe
        from hybridflow.trainer.attached_cluster import doctor

    recipe = load_one_recipe(parsed.recipe, parsed.overrides, parsed.actor)
    check_used(recipe.network, 1, recipe.placement.cluster)
    doctor(recipe)
    return 0
