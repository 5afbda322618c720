"""`hybridflow launch slurm`: submits a run on the nodes of a Slurm job, by `launch/slurm.sbatch` filled in."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine3d.errors import EngineError, UserError, shortened
from engine3d.startup.imports import quick_imports
from hybridflow.cli.agent import MOST_HOSTS
from hybridflow.cluster.devices.device_map import ROLES

TEMPLATE = Path(__file__).parents[2] / "launch/slurm.sbatch"
LAUNCHERS = ("slurm",)
_BEGIN, _END = "# Settings of this job\n", "# End of settings\n"
_SUBMIT_S = 60.0
_MOST_RESTARTS = 10**6 - 1
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?")
_WORD = re.compile(r"[\w.,:+=@%/-]+", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow launch`."""
    parser.add_argument("launcher", choices=LAUNCHERS, help="what starts the run")
    parser.add_argument("recipe", metavar="RECIPE", help="on a disk that all nodes see")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for hybridflow train")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each that the job gets")
    parser.add_argument("--partition", metavar="NAME", help="of Slurm")
    parser.add_argument("--account", metavar="NAME", help="of Slurm")
    parser.add_argument("--time", metavar="TIME", help="limit of the job, such as 24:00:00 or 2-00")
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE=N",
        help="the next N nodes are for train, rollout or reward; may be repeated, for all nodes in their order",
    )
    parser.add_argument("--interface", metavar="NAME", help="network interface of the cluster on every node")
    parser.add_argument("--cpu-slots", type=int, metavar="N", help="CPU slots of each node (one a core)")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="starts after failures, within the job (0)"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="the last N nodes stand by, each for one that is lost (0)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script in place of submitting it")


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: an option or the recipe is wrong, or Slurm refuses the job.
        EngineError: Slurm does not answer.
    """
    with quick_imports():
        from hybridflow.config.recipe import load_recipe

    recipe = load_recipe(parsed.recipe, parsed.overrides)
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
    _check_count("--nodes", parsed.nodes, MOST_HOSTS)
    options = {"job-name": f"hybridflow-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}", "nodes": str(parsed.nodes)}
    if parsed.gpus_per_node is not None:
        _check_count("--gpus-per-node", parsed.gpus_per_node, 1024)
        options["gpus-per-node"] = str(parsed.gpus_per_node)
    if parsed.cpu_slots is not None:
        _check_count("--cpu-slots", parsed.cpu_slots, 1 << 20)
    if not 0 <= parsed.max_restarts <= _MOST_RESTARTS:
        raise UserError(f"--max-restarts {parsed.max_restarts}: expected at least 0 and at most {_MOST_RESTARTS:,}")
    if not 0 <= parsed.spares < parsed.nodes:
        raise UserError(f"--spares {parsed.spares} of {parsed.nodes} nodes: expected fewer, and at least 0")
    if parsed.spares and not parsed.max_restarts:
        raise UserError(f"--spares {parsed.spares} without --max-restarts: a node that stands by would never be used")
    if parsed.max_restarts:
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
        "roles": " ".join(_roles(parsed.role, parsed.nodes)),
        "restarts": str(parsed.max_restarts),
        "spares": str(parsed.spares),
    }
    return _filled(_template(), options, settings, [parsed.recipe, *parsed.overrides])


def _template() -> str:
    try:
        return TEMPLATE.read_text()
    except OSError as error:
        raise UserError(
            f"launch slurm: cannot read {TEMPLATE} ({error.strerror}), which comes with the repository"
        ) from None


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


def _roles(given: Sequence[str], nodes: int) -> list[str]:
    """One a node; none if none is given."""
    roles: list[str] = []
    for text in given:
        role, _, count = text.partition("=")
        if role not in ROLES or not (count.isascii() and count.isdecimal() and 0 < int(count) <= MOST_HOSTS):
            raise UserError(f"--role {shortened(text)}: expected ROLE=N, where ROLE is one of {', '.join(ROLES)}")
        roles += [role] * int(count)
    if roles and len(roles) != nodes:
        raise UserError(f"--role {' --role '.join(given)}: {len(roles)} nodes, expected {nodes} (--nodes)")
    return roles


def _check_count(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise UserError(f"{option} {value}: expected a whole number of at least 1 and at most {most:,}")


def _submit(script: str) -> str:
    """The job's id."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=_SUBMIT_S, check=False
        )
    except FileNotFoundError:
        raise UserError("launch slurm: there is no sbatch on this host; --dry-run prints the script") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"sbatch has not answered within {_SUBMIT_S:g} s") from None
    if done.returncode:
        raise UserError(f"launch slurm: sbatch refuses the job: {shortened(' '.join(done.stderr.split()), 500)}")
    return done.stdout.strip().partition(";")[0]
