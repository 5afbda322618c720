"""`hybridflow launch`: submits a run on several nodes to a cluster's scheduler."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import ModuleType

from engine3d.errors import UserError
from hybridflow.cli.launch import kubernetes as launch_kubernetes
from hybridflow.cli.launch import slurm as launch_slurm

LAUNCHERS: Mapping[str, ModuleType] = {"slurm": launch_slurm, "kubernetes": launch_kubernetes}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow launch`."""
    parser.add_argument("launcher", choices=LAUNCHERS, help="what starts the run")
    parser.add_argument(
        "recipe", metavar="RECIPE", help="for Slurm on a disk that all nodes see; Kubernetes gets a copy"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for hybridflow train")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each that the job gets")
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE=N",
        help="the next N nodes are for train, rollout or reward; may be repeated, for all nodes in their order",
    )
    parser.add_argument("--cpu-slots", type=int, metavar="N", help="CPU slots of each node (one a core)")
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="starts after failures: within a job of Slurm (0), or of Kubernetes' job, also after pre-emption (3)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    for name, launcher in LAUNCHERS.items():
        launcher.add_arguments(parser.add_argument_group(name))


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: an option or the recipe is wrong, or the cluster refuses the job.
        EngineError: the cluster does not answer.
    """
    for name, launcher in LAUNCHERS.items():
        for option in launcher.OPTIONS if name != parsed.launcher else ():
            if getattr(parsed, option.replace("-", "_")) is not None:
                raise UserError(f"--{option} is an option of launch {name}; expected none of it with {parsed.launcher}")
    return int(LAUNCHERS[parsed.launcher].run(parsed))
