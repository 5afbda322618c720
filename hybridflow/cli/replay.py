"""`hybridflow replay`: makes a step of a run again from its checkpoint and its samples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.startup.imports import quick_imports
from hybridflow.cli import actors
from hybridflow.cli.outcome import fail, guarded
from hybridflow.cluster.hosts.checks.host_check import check_open_files
from hybridflow.cluster.processes.termination import termination

if TYPE_CHECKING:
    from hybridflow.trainer.replaying.plan import ReplayPlan

DIFFERENT = 3
"""The exit code where a step is not what it was."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as train.layout.tp=2")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step that is made again")
    parser.epilog = (
        "Ends with 0 where weights and figures are the same bits, or within the tolerance where other settings, "
        f"software or hardware make other bits; with {DIFFERENT} where they are not."
    )


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: the step cannot be made again; nothing has begun.
    """
    actors.end_with_parent()
    check_open_files()
    if parsed.step < 1:
        raise UserError(f"--step {parsed.step}: expected at least 1")
    with quick_imports():
        from hybridflow.planning.recipe_check import check_recipe
        from hybridflow.trainer.replaying.plan import plan_replay

    plan = plan_replay(parsed.run, parsed.step, parsed.overrides)
    for line in [*check_recipe(plan.recipe), *plan.lines()]:
        print(line, flush=True)
    termination.grace_s = plan.recipe.limits.stop_s
    if plan.recipe.placement.cluster is not None and (code := guarded(lambda: _check_cluster(plan))):
        return code
    try:
        return guarded(lambda: _replay(plan))
    except UserError as error:
        return fail(error, 1)


def _check_cluster(plan: ReplayPlan) -> int:
    from hybridflow.trainer.attached_cluster import check_cluster_of

    check_cluster_of(plan.recipe)
    return 0


def _replay(plan: ReplayPlan) -> int:
    with quick_imports():
        from hybridflow.trainer.replaying.replay import replay

    found = replay(plan)
    print("\n".join(found.lines()), flush=True)
    return 0 if found.as_expected else DIFFERENT
