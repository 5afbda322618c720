"""The command `hybridflow`.

    hybridflow train RECIPE [key=value ...]     run a recipe
    hybridflow check RECIPE [key=value ...]     find what is wrong with it, without starting anything; with --memory
                                                say what each GPU is going to hold
    hybridflow checkpoint inspect DIR           show what is in a checkpoint
    hybridflow checkpoint verify DIR            compare every file of it with its checksum
    hybridflow checkpoint export DIR OUT        write its model as a HuggingFace directory
    hybridflow checkpoint import MODEL OUT      make a checkpoint of a HuggingFace directory
    hybridflow report RUN [--out FILE]          draw a run's metrics as one HTML page

Ends with 0; with 2 for bad input and for what `check` finds; with 1 for a failure while running and for what `verify`
finds; with 130 after Ctrl-C and 143 after SIGTERM. The first line on stderr says what was wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Never

from engine3d.errors import EngineError, UserError
from engine3d.imports import quick_imports

if TYPE_CHECKING:
    from hybridflow.config import Recipe
    from hybridflow.devices import Node

_METRIC_SINKS = ("metrics.jsonl=true", "metrics.csv=true", "metrics.tensorboard=true")


class _Terminated(BaseException):
    """SIGTERM: unwinds the stack, so that everything is put away as after Ctrl-C."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        print(f"hybridflow: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in words if not word.startswith("-")), None)
    own_parser, action = {
        "checkpoint": (_checkpoint_parser, _checkpoint),
        "report": (_report_parser, _report),
    }.get(command or "", (None, _train_or_check))
    if command is not None and own_parser is not None:
        words.remove(command)
        parsed = own_parser().parse_args(words)
    else:
        parsed = _parser().parse_intermixed_args(words)
    if not sys.warnoptions:  # PYTHONWARNINGS brings them back
        _silence_libraries()
    try:
        return action(parsed)
    except UserError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _say("hybridflow: interrupted", 130)
    except _Terminated:
        return _say("hybridflow: terminated", 143)


def _silence_libraries() -> None:
    """Keep libraries' warnings in this process from standing before the one line that matters."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Says on import that a machine without a GPU has none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _train_or_check(parsed: argparse.Namespace) -> int:
    if parsed.command == "check":
        return _check(parsed)
    of_check = {"--memory": parsed.memory, "--nodes": parsed.nodes, "--gpus-per-node": parsed.gpus_per_node}
    of_check |= {"--gpu-gb": parsed.gpu_gb, "--host-gb": parsed.host_gb}  # both above 0
    if given := [option for option, value in of_check.items() if value]:
        raise UserError(f"{given[0]} is an option of hybridflow check, and starts nothing")
    recipe = _checked_recipe(parsed)
    try:
        return _guarded(lambda: _train(recipe))
    except UserError as error:
        return _fail(error, 1)


def _check(parsed: argparse.Namespace) -> int:
    nodes = _named_nodes(parsed)
    recipe = _checked_recipe(parsed, nodes)
    if parsed.memory:
        from hybridflow.memory_check import recipe_ledger

        ledger = recipe_ledger(recipe, nodes, parsed.gpu_gb, parsed.host_gb)
        print("\n".join(ledger.lines()))
        ledger.check()
    if nodes is None:
        from hybridflow.check import check_nobody_else

        check_nobody_else(recipe)
    print(f"{parsed.recipe}: nothing wrong found")
    return 0


def _named_nodes(parsed: argparse.Namespace) -> list[Node] | None:
    """The nodes that the options name; None for this machine."""
    from hybridflow.devices import Node

    if parsed.nodes is None and parsed.gpus_per_node is None:
        return None
    count = 1 if parsed.nodes is None else parsed.nodes
    gpus = 8 if parsed.gpus_per_node is None else parsed.gpus_per_node
    for option, value in (("--nodes", count), ("--gpus-per-node", gpus)):
        if value < 1:
            raise UserError(f"{option} {value}: expected a whole number of at least 1")
    return [Node(f"node {number}", gpus=gpus, cpu_slots=0) for number in range(count)]


def _checked_recipe(parsed: argparse.Namespace, nodes: Sequence[Node] | None = None) -> Recipe:
    with quick_imports():
        from hybridflow.config import load_recipe

    overrides = [*(_METRIC_SINKS if parsed.track_metrics else ()), *parsed.overrides]
    recipe = load_recipe(parsed.recipe, overrides)

    with quick_imports():
        from hybridflow.check import check_recipe

    gpu_bytes, host_bytes = (None if each is None else round(each * 1e9) for each in (parsed.gpu_gb, parsed.host_gb))
    # With --memory the ledger is shown first, and then refuses.
    for warning in check_recipe(recipe, nodes, gpu_bytes=gpu_bytes, host_bytes=host_bytes, must_fit=not parsed.memory):
        print(warning, flush=True)
    return recipe


def _train(recipe: Recipe) -> int:
    with quick_imports():
        from hybridflow.trainer import train

    train(recipe)
    return 0


def _checkpoint(parsed: argparse.Namespace) -> int:
    from hybridflow import checkpoint_cli

    return _guarded(lambda: checkpoint_cli.run(parsed))


def _report(parsed: argparse.Namespace) -> int:
    from hybridflow.report.page import write_report

    def write() -> int:
        print(write_report(parsed.run, parsed.out))
        return 0

    return _guarded(write)


def _guarded(work: Callable[[], int]) -> int:
    """Do what takes its time: a failure in it is told and makes the exit code 1, and SIGTERM unwinds the stack."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return work()
    except UserError:
        raise
    except EngineError as error:
        return _fail(error, 1)
    except Exception as error:
        return _say(f"hybridflow: internal error: {_one_line(error)}\n{traceback.format_exc()}", 1)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


def _fail(error: UserError | EngineError, code: int) -> int:
    """Print an error's lines, one each, and where a rank reported it, that rank's stack below."""
    failure = getattr(error, "failure", None)
    stack = f"\n{failure.stack}".rstrip() if failure and isinstance(error, EngineError) else ""
    return _say("\n".join(f"hybridflow: {line}" for line in str(error).splitlines()) + stack, code)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def _parser() -> argparse.ArgumentParser:
    from hybridflow import __version__

    parser = _Parser(
        prog="hybridflow", description="Reinforcement learning of large mixture-of-experts language models."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = "run a recipe, or only find what is wrong with it; the others have a --help of their own"
    parser.add_argument("command", choices=("train", "check", "checkpoint", "report"), help=commands)
    parser.add_argument("recipe", help="a YAML file such as launch/recipes/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as train.layout.tp=2 seed=1")
    parser.add_argument("--track_metrics", action="store_true", help="write metrics to JSONL, CSV and TensorBoard")
    parser.add_argument("--memory", action="store_true", help="check: say what each GPU will hold in each phase")
    parser.add_argument("--nodes", type=int, metavar="N", help="check: on so many nodes, not on this machine")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="check: GPUs of each of these nodes (8)")
    parser.add_argument("--gpu-gb", type=_gigabytes, metavar="GB", help="check: memory of each GPU, in 1e9 bytes")
    parser.add_argument("--host-gb", type=_gigabytes, metavar="GB", help="check: memory of each node, in 1e9 bytes")
    return parser


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return value


def _checkpoint_parser() -> argparse.ArgumentParser:
    from hybridflow.checkpoint_cli import add_commands

    parser = _Parser(prog="hybridflow checkpoint", description="Look at checkpoints, and turn them into models.")
    add_commands(parser)
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hybridflow report", description="Draw a run's metrics as one HTML page.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page to write (RUN/report.html)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
