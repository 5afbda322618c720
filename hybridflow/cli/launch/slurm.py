"""`hybridflow launch slurm`: submits a run on the nodes of a Slurm job, by `launch/slurm.sbatch` filled in."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine3d.errors import UserError, shortened
from engine3d.startup.imports import quick_imports
from hybridflow.cli.launch.options import FILES, check_counts, hand_over, host_roles, read_own_file

OPTIONS = ("partition", "account", "time", "interface", "spares")
"""Options that no other launcher has."""
_BEGIN, _END = "# Settings of this job\n", "# End of settings\n"
_MOST_RESTARTS = 10**6 - 1
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?")
_WORD = re.compile(r"[\w.,:+=@%/-]+", re.ASCII)


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """The options that no other launcher has."""
    parser.add_argument("--partition", metavar="NAME", help="of Slurm")
    parser.add_argument("--account", metavar="NAME", help="of Slurm")
    parser.add_argument("--time", metavar="TIME", help="limit of the job, such as 24:00:00 or 2-00")
    parser.add_argument("--interface", metavar="NAME", help="network interface of the cluster on every node")
    parser.add_argument(
        "--spares", type=int, metavar="N", help="the last N nodes stand by, each for one that is lost (0)"
    )


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: an option or the recipe is wrong, or Slurm refuses the job.
        EngineError: Slurm does not answer.
    """
    with quick_imports():
        from hybridflow.config.actors import load_one_recipe

    recipe = load_one_recipe(parsed.recipe, parsed.overrides)
    script = slurm_script(parsed, recipe.name)
    if parsed.dry_run:
        print(script, end="")
    else:
        print(f"job {_submit(script)}")
    return 0


def slurm_script(parsed: argparse.Namespace, name: str) -> str:
    """The script of a job.

    Args:
        parsed: options of the command.
        name: of the run.

    Raises:
        UserError: an option is wrong.
    """
    check_counts(parsed)
    options = {"job-name": f"hybridflow-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}", "nodes": str(parsed.nodes)}
    if parsed.gpus_per_node is not None:
        options["gpus-per-node"] = str(parsed.gpus_per_node)
    restarts, spares = _restarts_and_spares(parsed)
    if restarts:
        options["no-kill"] = ""  # of the job, when a node fails
    if parsed.time is not None and not _TIME.fullmatch(parsed.time):
        raise UserError(f"--time {shortened(parsed.time)}: expected Slurm's form, such as 24:00:00, 2-00 or 90")
    for option in ("partition", "account", "time", "interface"):
        if (value := getattr(parsed, option)) is None:
            continue
        if not _WORD.fullmatch(value):
            raise UserError(f"--{option} {shortened(value)}: expected one word of letters, digits and .,:+=@%/-")
        if option != "interface":
            options[option] = value
    settings = {
        "directory": str(Path.cwd()),
        "python": sys.executable,
        "interface": parsed.interface or "",
        "cpu_slots": "" if parsed.cpu_slots is None else str(parsed.cpu_slots),
        "roles": " ".join(host_roles(parsed.role, parsed.nodes)),
        "restarts": str(restarts),
        "spares": str(spares),
    }
    text = read_own_file("slurm", FILES / "slurm.sbatch")
    return _filled(text, options, settings, [parsed.recipe, *parsed.overrides])


def _restarts_and_spares(parsed: argparse.Namespace) -> tuple[int, int]:
    restarts, spares = parsed.max_restarts or 0, parsed.spares or 0
    if not 0 <= restarts <= _MOST_RESTARTS:
        raise UserError(f"--max-restarts {restarts}: expected at least 0 and at most {_MOST_RESTARTS:,}")
    if not 0 <= spares < parsed.nodes:
        raise UserError(f"--spares {spares} of {parsed.nodes} nodes: expected fewer, and at least 0")
    if spares and not restarts:
        raise UserError(f"--spares {spares} without --max-restarts: a node that stands by would never be used")
    return restarts, spares


def _filled(text: str, options: Mapping[str, str], settings: Mapping[str, str], words: Sequence[str]) -> str:
    for option, value in options.items():
        line = f"#SBATCH --{option}={value}\n" if value else f"#SBATCH --{option}\n"
        if (there := re.search(rf"^#SBATCH --{option}=.*\n", text, re.MULTILINE)) is not None:
            text = text[: there.start()] + line + text[there.end() :]
        else:
            before, first, after = text.partition("#SBATCH ")
            text = f"{before}{line}{first}{after}"
    head, _, rest = text.partition(_BEGIN)
    lines = [*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), f"words=({shlex.join(words)})"]
    return "".join([head, _BEGIN, *(f"{line}\n" for line in lines), _END, rest.partition(_END)[2]])


def _submit(script: str) -> str:
    """The job's id."""
    command = ["sbatch", "--parsable"]
    answer = hand_over("slurm", command, script, prints="the script", refuses="refuses the job")
    return answer.partition(";")[0]
