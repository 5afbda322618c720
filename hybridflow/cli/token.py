"""`hybridflow token`: makes the secret that lets the hosts of a run know each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridflow.cluster.hosts.run_token import default_file, write_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow token`."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=f"({default_file()})")


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: the file is there already, or cannot be written.
    """
    path = parsed.file or default_file()
    write_token(path)
    print(path)
    return 0
