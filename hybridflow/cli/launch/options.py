"""Common options of the launchers of `hybridflow launch`: counts, roles of hosts, files of the repository."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

from engine3d.errors import EngineError, UserError, shortened
from hybridflow.cli.agent import MOST_HOSTS
from hybridflow.cluster.devices.device_map import ROLES

_SUBMIT_S = 60.0
FILES = Path(__file__).parents[3] / "launch"
"""Directory of the launchers' own files."""


def check_count(option: str, value: int, most: int) -> None:
    """A number that an option gives.

    Raises:
        UserError: it is below 1 or above `most`.
    """
    if not 1 <= value <= most:
        raise UserError(f"{option} {value}: expected a whole number of at least 1 and at most {most:,}")


def check_counts(parsed: argparse.Namespace) -> None:
    """The numbers that every launcher takes.

    Raises:
        UserError: one of them is out of range.
    """
    check_count("--nodes", parsed.nodes, MOST_HOSTS)
    if parsed.gpus_per_node is not None:
        check_count("--gpus-per-node", parsed.gpus_per_node, 1024)
    if parsed.cpu_slots is not None:
        check_count("--cpu-slots", parsed.cpu_slots, 1 << 20)


def host_roles(given: Sequence[str], nodes: int) -> list[str]:
    """One a node, from "train=3" and the like; none if none is given.

    Raises:
        UserError: a role that there is not, or not one for each node.
    """
    roles: list[str] = []
    for text in given:
        role, _, count = text.partition("=")
        if role not in ROLES or not (count.isascii() and count.isdecimal() and 0 < int(count) <= MOST_HOSTS):
            raise UserError(f"--role {shortened(text)}: expected ROLE=N, where ROLE is one of {', '.join(ROLES)}")
        roles += [role] * int(count)
    if roles and len(roles) != nodes:
        raise UserError(f"--role {' --role '.join(given)}: {len(roles)} nodes, expected {nodes} (--nodes)")
    return roles


def read_own_file(launcher: str, path: Path) -> str:
    """A file of `FILES`.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(
            f"launch {launcher}: cannot read {path} ({error.strerror}), which comes with the repository"
        ) from None


def hand_over(launcher: str, command: Sequence[str], text: str, *, prints: str, refuses: str) -> str:
    """Give a scheduler's program what it is to run, on its standard input; what it answers.

    Args:
        launcher: names it in errors.
        command: of the program.
        text: for it.
        prints: what --dry-run prints in place of this.
        refuses: how errors say that it does not take the text.

    Raises:
        UserError: there is no such program here, or it refuses the text.
        EngineError: it does not answer.
    """
    program = command[0]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SUBMIT_S, check=False)
    except FileNotFoundError:
        raise UserError(f"launch {launcher}: there is no {program} on this host; --dry-run prints {prints}") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{program} has not answered within {_SUBMIT_S:g} s") from None
    if done.returncode:
        raise UserError(f"launch {launcher}: {program} {refuses}: {shortened(' '.join(done.stderr.split()), 500)}")
    return done.stdout.strip()
