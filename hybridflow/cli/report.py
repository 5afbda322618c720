"""`hybridflow report`: draws a run's metrics as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.rundir.actor_runs import runs_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow report`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument(
        "--steps",
        nargs=2,
        type=int,
        metavar="N",
        help="put the responses to held-out prompts of these two steps side by side (the first and the last)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page to write (RUN/report.html)")


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, or something in it cannot be read.
    """
    from hybridflow.report.page import write_report

    runs = runs_in(parsed.run)
    if len(runs) > 1 and parsed.out is not None:
        raise UserError(
            f"{parsed.run} holds the runs of the actors {', '.join(run.name for run in runs)}; --out is the page of one"
        )
    for run in runs:
        print(write_report(run, parsed.out, tuple(parsed.steps) if parsed.steps else None))
    return 0
