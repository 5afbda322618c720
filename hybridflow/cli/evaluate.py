"""`hybridflow evaluate`: measures a model on held-out sets, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from engine3d.errors import UserError
from engine3d.startup.imports import quick_imports
from hybridflow.cli import actors
from hybridflow.cli.common.outcome import fail, guarded
from hybridflow.cli.common.recipe_arguments import check_cluster
from hybridflow.cluster.hosts.checks.host_check import check_open_files
from hybridflow.cluster.processes.termination import termination
from hybridflow.metrics.evaluation_statistics import HIGH, LENGTH, LOW, TRUNCATED, figure_names
from hybridflow.metrics.names import SET_LEFT_OUT

if TYPE_CHECKING:
    from hybridflow.planning.data.evaluation_plan import EvaluationPlan
    from hybridflow.trainer.evaluation.alone import Evaluated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "target", metavar="RECIPE|RUN|MODEL", type=Path, help="a recipe, a run's directory, or a HuggingFace directory"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as placement.rollout=cuda:0")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME", dest="sets", help="of evaluation; all sets unless given"
    )
    parser.add_argument("--recipe", type=Path, help="with the sets: for a MODEL, or in place of a RUN's own")
    parser.add_argument("--checkpoint", metavar="STEP|best|last", help="of the run (last)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where metrics and responses go (RUN/evaluate/..., RUN_DIR/NAME-evaluate)",
    )


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: something is wrong with what is to be evaluated; nothing has begun.
    """
    actors.end_with_parent()
    check_open_files()
    with quick_imports():
        from hybridflow.planning.data.evaluation_plan import plan_evaluation

    plan = plan_evaluation(
        parsed.target,
        parsed.sets,
        parsed.overrides,
        recipe=parsed.recipe,
        checkpoint=parsed.checkpoint,
        out=parsed.out,
    )
    for line in (*plan.notes, f"evaluating {plan.weights} on {', '.join(plan.recipe.sets)}"):
        print(line, flush=True)
    termination.grace_s = plan.recipe.limits.stop_s
    if code := check_cluster(plan.recipe):
        return code
    try:
        return guarded(lambda: _evaluate(plan))
    except UserError as error:
        return fail(error, 1)


def _evaluate(plan: EvaluationPlan) -> int:
    with quick_imports():
        from hybridflow.trainer.evaluation.alone import RESULT, evaluate_alone

    evaluated = evaluate_alone(plan)
    _show(plan, evaluated)
    print(f"metrics and responses are in {evaluated.directory / RESULT} and beside it", flush=True)
    return 0


def _show(plan: EvaluationPlan, evaluated: Evaluated) -> None:
    """A row for each figure of each set."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("set", "prompts", "k", "figure", "value", "95 % interval"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("prompts", "k", "value") else "left")
    for name, planned in plan.recipe.sets.items():
        measured = evaluated.sets[name]
        head = [name, f"{measured.prompts:,}", str(measured.samples)]
        for figure in (
            *figure_names(measured.samples, votes=planned.votes, measure=planned.measure),
            LENGTH,
            TRUNCATED,
        ):
            if (value := measured.statistics.get(figure)) is not None:
                low, high = measured.statistics.get(f"{figure}{LOW}"), measured.statistics.get(f"{figure}{HIGH}")
                interval = f"{low:.4f} to {high:.4f}" if low is not None and high is not None else ""
                table.add_row(*head, figure, f"{value:.4f}", interval)
                head = ["", "", ""]
        if left_out := int(measured.statistics[SET_LEFT_OUT]):
            table.add_row(*head, SET_LEFT_OUT, f"{left_out:,}", "")
    Console(highlight=False, soft_wrap=True).print(table)
    _show_noise(plan, evaluated)


def _show_noise(plan: EvaluationPlan, evaluated: Evaluated) -> None:
    """Say how far the values depend on the responses that were drawn, and what the run measured of its checkpoint."""
    from hybridflow.checkpoint.set_results import compared_with_run, measured_at

    if any(planned.sampling.temperature > 0 for planned in plan.recipe.sets.values()):
        print(
            "responses are sampled: another evaluation draws others, and its values differ by about the width of the "
            "intervals; more prompts or samples make these narrower"
        )
    of_run = measured_at(plan.checkpoint) if plan.checkpoint is not None else {}
    for name, planned in plan.recipe.sets.items():
        if name in of_run:
            print(compared_with_run(name, evaluated.sets[name], of_run[name], planned.sampling.temperature))
