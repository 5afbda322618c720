"""`hybridflow report`: draws a run's metrics as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow report`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page to write (RUN/report.html)")


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, or something in it cannot be read.
    """
    from hybridflow.report.page import write_report

    print(write_report(parsed.run, parsed.out))
    return 0
