"""The command `hybridflow`.

    hybridflow train RECIPE [key=value ...]     run a recipe
    hybridflow check RECIPE [key=value ...]     find what is wrong with it, without starting anything; with --memory
                                                say what each GPU, CPU slot and node will hold
    hybridflow doctor RECIPE [key=value ...]    say what this host is, or the nodes of placement.cluster, and whether
                                                the run could start there
    hybridflow checkpoint inspect DIR           show what is in a checkpoint
    hybridflow checkpoint verify DIR            compare every file of it with its checksum
    hybridflow checkpoint export DIR OUT        write its model as a HuggingFace directory
    hybridflow checkpoint import MODEL OUT      make a checkpoint of a HuggingFace directory
    hybridflow report RUN [--out FILE]          draw a run's metrics as one HTML page
    hybridflow status RUN                       say what a run is at, also while it goes on
    hybridflow logs RUN [--follow]              show the output of its ranks and engines
    hybridflow launch slurm RECIPE --nodes N    submit a run on several nodes of Slurm
    hybridflow launch kubernetes RECIPE ...     submit a run on several nodes of Kubernetes
    hybridflow agent ... train RECIPE ...       one host's part of a run on several: what the launchers start
    hybridflow token [FILE]                     make the secret that lets the hosts of a run know each other

Ends with 0; with 2 for bad input and for what `check` finds; with 1 for a failure while running and for what `verify`
finds; with 130 after Ctrl-C and 143 after SIGTERM, or 75 where it has saved first. The first line on stderr says what
was wrong.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from engine3d.errors import EngineError, UserError, shortened, visible
from engine3d.startup.imports import quick_imports
from hybridflow.cli.last_words import last_words
from hybridflow.cli.standard_streams import be_patient
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.hosts.checks.host_check import check_interpreter, check_open_files
from hybridflow.cluster.hosts.description import checked_role
from hybridflow.cluster.hosts.driver_link import driver_link, tell_failure
from hybridflow.cluster.hosts.run_token import default_file, write_token
from hybridflow.cluster.processes.termination import termination
from hybridflow.errors.rank_failure import Failure

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe

_METRIC_SINKS = ("metrics.jsonl=true", "metrics.csv=true", "metrics.tensorboard=true")

_OF_THE_SURROUNDINGS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG, errno.EMFILE, errno.ENFILE}
    | {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOMEM}
)
"""Errors of the system that say enough with the name of the file: nothing of this program is wrong."""

_MOST_GB = 1e9


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        print(f"hybridflow: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        arguments: of a command in a program that goes on; None for those of this process, which ends with it.
    """
    with termination.handled():
        try:
            termination.begin()
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
            termination.settle()
        except BaseException as error:
            termination.settle()
            if termination.cause is None:
                if not isinstance(error, KeyboardInterrupt):
                    raise
                code = _say("hybridflow: interrupted", 130)
        if termination.cause is not None:
            code = termination.finish()
            last_words.note(termination.cause.line)
    if code == 1:
        last_words.say()
    if arguments is None:
        termination.leave(code)
    return code


def _run(words: list[str]) -> int:
    command = next((word for word in words if not word.startswith("-")), None)
    output = be_patient(_say_that_training_goes_on if command == "train" else None)
    try:
        return _run_command(words, command)
    finally:
        # What other commands print is what they are for; argparse ends the program when it has shown its help.
        if output is not None and output.error is not None and command != "train":
            sys.exit(_say(f"hybridflow: standard output cannot be written: {output.error.strerror}", 1))


def _say_that_training_goes_on(error: OSError) -> None:
    _say(f"hybridflow: standard output cannot be written: {error.strerror}; the run goes on without it", 0)


def _run_command(words: list[str], command: str | None) -> int:
    if command not in _COMMANDS:  # --help, --version, or an error
        command = str(_parser().parse_args(words).command)
    words.remove(command)
    make_parser, action = _COMMANDS[command]
    parser = make_parser()
    parsed = parser.parse_args(words) if command == "checkpoint" else parser.parse_intermixed_args(words)
    parsed.words = words
    if not sys.warnoptions:  # PYTHONWARNINGS brings them back
        _silence_libraries()
    try:
        check_interpreter()
        return action(parsed)
    except UserError as error:
        tell_failure("", str(error).partition("\n")[0])
        return _fail(error, 2)
    except OSError as error:
        if error.errno not in _OF_THE_SURROUNDINGS:
            raise
        tell_failure("", _told(error))
        return _say(f"hybridflow: {_told(error)}", 2)


def _silence_libraries() -> None:
    """Keep libraries' warnings in this process from standing before the one line that matters."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Says on import that a machine without a GPU has none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _train(parsed: argparse.Namespace) -> int:
    from hybridflow.trainer import closing

    began = time.monotonic()
    print(f"checking {parsed.recipe}", flush=True)
    recipe = _checked_recipe(parsed, here=True)
    print(f"checked in {time.monotonic() - began:.1f} s", flush=True)
    termination.grace_s = recipe.limits.stop_s
    if recipe.placement.cluster is not None and (code := _guarded(lambda: _check_cluster(recipe))):
        return code

    def tell_how_to_go_on() -> None:
        if lines := closing.how_to_go_on(recipe, parsed.words):
            print("\n".join(lines), file=sys.stderr, flush=True)

    def say_what_it_failed_of() -> None:
        assert termination.cause is not None
        if termination.cause.code == 1:
            last_words.note(termination.cause.line)
            note_directory()
            last_words.say()

    def note_directory() -> None:
        last_words.directory = recipe.directory if closing.has_begun(recipe) else None

    termination.last_words = say_what_it_failed_of
    termination.add_resort(note_directory)
    termination.add_resort(tell_how_to_go_on)  # after Ctrl-C it stands below the line that says so
    try:
        code = _guarded(lambda: _run_recipe(recipe))
    except UserError as error:
        code = _fail(error, 1)
    termination.remove_resort(tell_how_to_go_on)
    if code:
        note_directory()
        tell_how_to_go_on()
    return code


def _check_cluster(recipe: Recipe) -> int:
    from hybridflow.trainer.attached_cluster import check_cluster_of

    check_cluster_of(recipe)
    return 0


def _check(parsed: argparse.Namespace) -> int:
    nodes = _named_nodes(parsed)
    # With --memory the ledger is shown first, and then refuses.
    recipe = _checked_recipe(
        parsed, nodes, gpu_bytes=_bytes(parsed.gpu_gb), host_bytes=_bytes(parsed.host_gb), must_fit=not parsed.memory
    )
    if parsed.memory:
        from hybridflow.planning.memory_report import recipe_ledger

        ledger = recipe_ledger(recipe, nodes, parsed.gpu_gb, parsed.host_gb)
        print("\n".join(ledger.lines()))
        ledger.check()
    if nodes is None:
        from hybridflow.planning.recipe_check import check_nobody_else

        check_nobody_else(recipe)
    print(f"{parsed.recipe}: nothing wrong found")
    return 0


def _named_nodes(parsed: argparse.Namespace) -> list[Node] | None:
    """The nodes that the options name; None for this machine."""
    from hybridflow.cluster.devices.device_map import MOST_GPUS, MOST_NODES

    if parsed.nodes is None and parsed.gpus_per_node is None:
        return None
    count = 1 if parsed.nodes is None else parsed.nodes
    gpus = 8 if parsed.gpus_per_node is None else parsed.gpus_per_node
    for option, value, most in (("--nodes", count, MOST_NODES), ("--gpus-per-node", gpus, MOST_GPUS)):
        if not 1 <= value <= most:
            raise UserError(f"{option} {value}: expected a whole number of at least 1 and at most {most:,}")
    roles: list[str | None] = [None] * count
    if parsed.roles is not None:
        roles = [checked_role(role) for role in parsed.roles.split(",")]
        if len(roles) != count:
            raise UserError(
                f"--roles {shortened(parsed.roles)}: {len(roles)} roles, expected one for each of {count} nodes"
            )
    return [Node(f"node {number}", gpus=gpus, cpu_slots=0, role=role) for number, role in enumerate(roles)]


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)


def _checked_recipe(parsed: argparse.Namespace, nodes: Sequence[Node] | None = None, **memory: Any) -> Recipe:
    """The recipe with nothing wrong in it; `memory` is what `check_recipe` takes beside recipe and nodes."""
    check_open_files()
    link = driver_link()
    if link is not None:
        nodes = [Node(host.name, host.gpus, host.cpu_slots, host.role) for host in link.cluster.hosts]
    with quick_imports():
        from hybridflow.config.recipe import load_recipe

    overrides = [*(_METRIC_SINKS if parsed.track_metrics else ()), *parsed.overrides]
    recipe = load_recipe(parsed.recipe, overrides)

    with quick_imports():
        from hybridflow.planning.recipe_check import check_recipe

    for warning in check_recipe(recipe, nodes, **memory):
        print(warning, flush=True)
    if link is not None:
        from hybridflow.planning.shared_disk import check_shared_disks

        check_shared_disks(recipe, link.cluster.hosts, link.apart)
    return recipe


def _run_recipe(recipe: Recipe) -> int:
    with quick_imports():
        from hybridflow.trainer.trainer import train

    train(recipe)
    return 0


def _checkpoint(parsed: argparse.Namespace) -> int:
    from hybridflow.cli import checkpoint

    return _guarded(lambda: checkpoint.run(parsed))


def _report(parsed: argparse.Namespace) -> int:
    from hybridflow.report.page import write_report

    def write() -> int:
        print(write_report(parsed.run, parsed.out))
        return 0

    return _guarded(write)


def _status(parsed: argparse.Namespace) -> int:
    from hybridflow.cli import watch

    return _guarded(lambda: watch.status(parsed))


def _logs(parsed: argparse.Namespace) -> int:
    from hybridflow.cli import watch

    return _guarded(lambda: watch.logs(parsed))


def _doctor(parsed: argparse.Namespace) -> int:
    from hybridflow.cli import doctor

    return _guarded(lambda: doctor.run(parsed))


def _agent(parsed: argparse.Namespace) -> int:
    from hybridflow.cli import agent

    return agent.run(parsed)


def _launch(parsed: argparse.Namespace) -> int:
    from hybridflow.cli import launch

    return _guarded(lambda: launch.run(parsed))


def _token(parsed: argparse.Namespace) -> int:
    path = parsed.file or default_file()
    write_token(path)
    print(path)
    return 0


def _guarded(work: Callable[[], int]) -> int:
    """Do what takes its time: a failure in it is told and makes the exit code 1."""
    try:
        return work()
    except UserError:
        raise
    except EngineError as error:
        return _fail(error, 1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_SURROUNDINGS:
            return _say(f"hybridflow: {_told(error)}", 1)
        return _say(f"hybridflow: internal error: {_one_line(error)}\n{traceback.format_exc()}", 1)


def _fail(error: UserError | EngineError, code: int) -> int:
    """Print an error's lines, one each, and where a rank reported it, that rank's stack below."""
    failure = getattr(error, "failure", None)
    stack = f"\n{failure.stack}".rstrip() if failure and isinstance(error, EngineError) else ""
    lines = [*(f"hybridflow: {line}" for line in str(error).splitlines()), *getattr(error, "__notes__", ())]
    return _say("\n".join(lines) + stack, code, failure)


def _say(text: str, code: int, failure: Failure | None = None) -> int:
    if termination.cause is None:  # by which all else came about
        if code == 1:
            last_words.note(text, failure)
        print(visible(text), file=sys.stderr, flush=True)
    return code


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def _told(error: OSError) -> str:
    name = "" if error.filename is None else f"{shortened(os.fsdecode(error.filename), 200)}: "
    return f"{name}{error.strerror}"


def _parser() -> argparse.ArgumentParser:
    from hybridflow import __version__

    commands = "\n".join((__doc__ or "").splitlines()[2:-4])
    parser = _Parser(
        prog="hybridflow",
        description="Reinforcement learning of large mixture-of-experts language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{commands}\n\nEach command has a --help of its own.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=", ".join(_COMMANDS))
    return parser


def _train_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hybridflow train", description="Run a recipe.")
    _add_recipe(parser)
    return parser


def _check_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hybridflow check", description="Find what is wrong with a recipe, without starting anything."
    )
    _add_recipe(parser)
    parser.add_argument("--memory", action="store_true", help="say what GPUs and nodes will hold in each phase")
    parser.add_argument("--nodes", type=_count, metavar="N", help="on so many nodes, not on this machine")
    parser.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of each of these nodes (8)")
    parser.add_argument(
        "--roles", metavar="ROLE,...", help="of these nodes, such as train,train,rollout: what a launcher gives each to"
    )
    parser.add_argument("--gpu-gb", type=_gigabytes, metavar="GB", help="memory of each GPU, in 1e9 bytes")
    parser.add_argument("--host-gb", type=_gigabytes, metavar="GB", help="memory of each node, in 1e9 bytes")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file such as launch/recipes/demo.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings, such as train.layout.tp=2 seed=1; resume=auto goes on after the newest checkpoint",
    )
    parser.add_argument("--track_metrics", action="store_true", help="write metrics to JSONL, CSV and TensorBoard")
    parser.epilog = "Relative paths, in the recipe too, start from the directory where the command runs."


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_GB:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most {_MOST_GB:g}, found {shortened(text)}")
    return value


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shortened(text)}") from None


def _checkpoint_parser() -> argparse.ArgumentParser:
    from hybridflow.cli.checkpoint import add_commands

    parser = _Parser(prog="hybridflow checkpoint", description="Look at checkpoints, and turn them into models.")
    add_commands(parser)
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hybridflow report", description="Draw a run's metrics as one HTML page.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page to write (RUN/report.html)")
    return parser


def _status_parser() -> argparse.ArgumentParser:
    from hybridflow.cli import watch

    parser = _Parser(prog="hybridflow status", description="Say what a run is at, also while it goes on.")
    watch.add_status_arguments(parser)
    return parser


def _logs_parser() -> argparse.ArgumentParser:
    from hybridflow.cli import watch

    parser = _Parser(prog="hybridflow logs", description="Show the output of a run's ranks and engines.")
    watch.add_logs_arguments(parser)
    return parser


def _agent_parser() -> argparse.ArgumentParser:
    from hybridflow.cli import agent

    parser = _Parser(prog="hybridflow agent", description="One host's part of a run on several hosts.")
    agent.add_arguments(parser)
    return parser


def _doctor_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hybridflow doctor",
        description="Say what this host is, or the nodes of placement.cluster, and whether the run could start there; "
        "a launcher does it for all of its hosts.",
    )
    _add_recipe(parser)
    return parser


def _launch_parser() -> argparse.ArgumentParser:
    from hybridflow.cli import launch

    parser = _Parser(prog="hybridflow launch", description="Submit a run on several nodes to a cluster's scheduler.")
    launch.add_arguments(parser)
    return parser


def _token_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hybridflow token", description="Make the secret that lets the hosts of a run know each other."
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=f"({default_file()})")
    return parser


_COMMANDS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "train": (_train_parser, _train),
    "check": (_check_parser, _check),
    "checkpoint": (_checkpoint_parser, _checkpoint),
    "report": (_report_parser, _report),
    "status": (_status_parser, _status),
    "logs": (_logs_parser, _logs),
    "doctor": (_doctor_parser, _doctor),
    "launch": (_launch_parser, _launch),
    "agent": (_agent_parser, _agent),
    "token": (_token_parser, _token),
}
