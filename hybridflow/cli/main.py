"""The command `hybridflow`.

    hybridflow init DIR [--model M] [--data F]  write a recipe and a reward for your model and data
    hybridflow train RECIPE [key=value ...]     run a recipe
    hybridflow resume RUN [key=value ...]       resume a run from its newest checkpoint, with its own recipe
    hybridflow check RECIPE [key=value ...]     check it without starting anything; --memory predicts the memory of each
                                                GPU, CPU slot and node
    hybridflow plan RECIPE [--nodes N] ...      plan placement, layouts and engines on a cluster: seconds of a step by
                                                phase, memory, the next better option
    hybridflow profile FILE                     measure the rates of this machine, for plan --profile FILE
    hybridflow settings [NAME]                  show the settings of recipes with type, default and meaning
    hybridflow data RECIPE [key=value ...]      show its prompts as the model reads them, their number and lengths, and
                                                dropped rows
    hybridflow doctor RECIPE [key=value ...]    describe this host, or the nodes of placement.cluster, and check that
                                                the run could start there
    hybridflow checkpoint inspect DIR           show the contents of a checkpoint
    hybridflow checkpoint verify DIR            compare every file of it with its checksum
    hybridflow checkpoint list RUN              list a run's checkpoints, with their values and the best one
    hybridflow checkpoint export DIR OUT        write its model as a HuggingFace directory
    hybridflow checkpoint import MODEL OUT      make a checkpoint of a HuggingFace directory
    hybridflow evaluate RECIPE|RUN|MODEL ...    measure a model on the recipe's held-out sets, without training
    hybridflow report RUN [--out FILE]          draw a run's metrics as one HTML page
    hybridflow samples RUN [--step N] ...       show the samples that a run was trained on, with their rewards
    hybridflow replay RUN --step N [key=value]  replay a step from its checkpoint and its samples, and compare
    hybridflow status RUN                       show the step and phase of a run, also while it runs
    hybridflow logs RUN [--follow]              show the output of its ranks and engines
    hybridflow launch slurm RECIPE --nodes N    submit a run on several nodes of Slurm
    hybridflow launch kubernetes RECIPE ...     submit a run on several nodes of Kubernetes
    hybridflow agent ... train RECIPE ...       one host's part of a run on several: what the launchers start
    hybridflow sandbox [--port N]               run programs for runs on other machines
    hybridflow token [FILE]                     make the secret that lets the hosts of a run know each other

Ends with 0; with 2 for bad input and for what `check` finds; with 1 for a failure while running and for what `verify`
finds; with 3 for what `replay` finds; with 130 after Ctrl-C and 143 after SIGTERM, or 75 where it has saved first; with
141 where the reader of its output is gone. The first line on stderr says what was wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Never

from engine3d.errors import UserError
from hybridflow.cli.common.command_words import as_settings, told_of_arguments
from hybridflow.cli.common.outcome import (
    OF_THE_SURROUNDINGS,
    be_patient,
    fail,
    guarded,
    last_words,
    say,
    system_error_text,
)
from hybridflow.cluster.driver_link import tell_failure
from hybridflow.cluster.hosts.checks.host_check import check_interpreter
from hybridflow.cluster.processes.termination import termination

_TRAINING = ("train", "resume")
_PRINTING = ("status", "logs", "samples", "settings")
"""Commands that do nothing but print, and end as soon as their reader is gone."""
_READER_GONE = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class Command:
    """One of the commands.

    Args:
        description: for its --help.
        add_arguments: to its parser.
        run: does it; returns the exit code.
        is_guarded: whether a failure that is not the user's is reported here; else `run` does so itself.
        has_commands: whether it has commands of its own.
        takes_recipe: whether its words are a recipe and settings; see `as_settings`.
    """

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    is_guarded: bool = False
    has_commands: bool = False
    takes_recipe: bool = False


_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
"""Values that are no options; argparse's own pattern has no exponents."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"allow_abbrev": False})  # `--role` is no `--roles`
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def error(self, message: str) -> Never:
        options = [option for action in self._actions for option in action.option_strings]
        takes_settings = any(action.metavar == "key=value" for action in self._actions)
        text = told_of_arguments(message, options, takes_settings)
        print(f"hybridflow: {text or message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        arguments: of a command in a program that continues; None for those of this process, which ends with it.
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
                code = say("hybridflow: interrupted", 130)
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
    on_failure = {**dict.fromkeys(_TRAINING, _say_that_output_is_lost), **dict.fromkeys(_PRINTING, _end_without_reader)}
    output = be_patient(on_failure.get(command or ""))
    try:
        return _run_command(words, command)
    finally:
        # What other commands print is what they are for; argparse ends the program when it has shown its help.
        if output is not None and output.error is not None and command not in _TRAINING:
            _end_without_reader(output.error)
            sys.exit(say(f"hybridflow: standard output cannot be written: {output.error.strerror}", 1))


def _say_that_output_is_lost(error: OSError) -> None:
    continues = termination.unless_ending("; the run continues without it")
    say(f"hybridflow: standard output cannot be written: {error.strerror}{continues}", 0)


def _end_without_reader(error: OSError) -> None:
    """End the command as SIGPIPE ends others, if the reader of a pipe is gone."""
    if isinstance(error, BrokenPipeError):
        sys.exit(_READER_GONE)


def _run_command(words: list[str], command: str | None) -> int:
    if command not in _COMMANDS:  # --help, --version, or an error
        command = str(_parser().parse_args(words).command)
    words.remove(command)
    chosen = _COMMANDS[command]()
    words = as_settings(words) if chosen.takes_recipe else words
    parser = _Parser(prog=f"hybridflow {command}", description=chosen.description)
    chosen.add_arguments(parser)
    parsed = parser.parse_args(words) if chosen.has_commands else parser.parse_intermixed_args(words)
    parsed.words = words
    if not sys.warnoptions:  # PYTHONWARNINGS brings them back
        _silence_libraries()
    try:
        check_interpreter()
        return guarded(lambda: chosen.run(parsed)) if chosen.is_guarded else chosen.run(parsed)
    except UserError as error:
        tell_failure("", str(error))
        return fail(error, 2)
    except OSError as error:
        if error.errno not in OF_THE_SURROUNDINGS:
            raise
        tell_failure("", system_error_text(error))
        return say(f"hybridflow: {system_error_text(error)}", 2)


def _silence_libraries() -> None:
    """Keep libraries' warnings in this process from standing before the one line that matters."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Says on import that a machine without a GPU has none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


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


def _init() -> Command:
    from hybridflow.cli.init import command as init

    description = "Write a recipe, a reward and a README for a model and data of one's own, which run as they are."
    return Command(description, init.add_arguments, init.run)


def _train() -> Command:
    from hybridflow.cli import train

    return Command("Run a recipe.", train.add_arguments, train.train, takes_recipe=True)


def _resume() -> Command:
    from hybridflow.cli import train

    description = "Continue a run after its newest checkpoint, by the recipe in its directory."
    return Command(description, train.add_resume_arguments, train.resume)


def _check() -> Command:
    from hybridflow.cli import check

    description = "Find what is wrong with a recipe, without starting anything."
    return Command(description, check.add_check_arguments, check.check, takes_recipe=True)


def _plan() -> Command:
    from hybridflow.cli import plan

    description = "Plan placement, layouts and engines of a recipe on a cluster, with the seconds of a step by phase."
    return Command(description, plan.add_arguments, plan.run, is_guarded=True, takes_recipe=True)


def _profile() -> Command:
    from hybridflow.cli import profile

    description = "Measure this machine in minutes, and write the hardware profile that hybridflow plan reads."
    return Command(description, profile.add_arguments, profile.run, is_guarded=True)


def _settings() -> Command:
    from hybridflow.cli import settings

    description = "Show the settings of recipes with type, default and meaning."
    return Command(description, settings.add_arguments, settings.run)


def _data() -> Command:
    from hybridflow.cli import check

    description = "Show the prompts of a recipe as the model reads them, their lengths and the rows that are dropped."
    return Command(description, check.add_data_arguments, check.data, is_guarded=True, takes_recipe=True)


def _checkpoint() -> Command:
    from hybridflow.cli import checkpoint

    description = "Look at checkpoints, and turn them into models."
    return Command(description, checkpoint.add_commands, checkpoint.run, is_guarded=True, has_commands=True)


def _evaluate() -> Command:
    from hybridflow.cli import evaluate

    description = "Measure a model, or a checkpoint of a run, on the held-out sets of a recipe, without training."
    return Command(description, evaluate.add_arguments, evaluate.run)


def _report() -> Command:
    from hybridflow.cli import watch

    return Command("Draw a run's metrics as one HTML page.", watch.add_report_arguments, watch.report, is_guarded=True)


def _samples() -> Command:
    from hybridflow.cli import samples

    description = "Show the samples that a run has learned from, as texts with their rewards."
    return Command(description, samples.add_arguments, samples.run, is_guarded=True)


def _replay() -> Command:
    from hybridflow.cli import train

    description = "Make a step of a run again from the nearest checkpoint and its samples, and compare what comes out."
    return Command(description, train.add_replay_arguments, train.replay)


def _status() -> Command:
    from hybridflow.cli import watch

    description = "Show the step and phase of a run, also while it runs."
    return Command(description, watch.add_status_arguments, watch.status, is_guarded=True)


def _logs() -> Command:
    from hybridflow.cli import watch

    description = "Show the output of a run's ranks and engines."
    return Command(description, watch.add_logs_arguments, watch.logs, is_guarded=True)


def _doctor() -> Command:
    from hybridflow.cli import check
    from hybridflow.cli.common import recipe_arguments

    description = (
        "Describe this host, or the nodes of placement.cluster, and check that the run could start there; "
        "a launcher does it for all of its hosts."
    )
    return Command(description, recipe_arguments.add_recipe, check.doctor, is_guarded=True, takes_recipe=True)


def _launch() -> Command:
    from hybridflow.cli.launch import command as launch

    description = "Submit a run on several nodes to a cluster's scheduler."
    return Command(description, launch.add_arguments, launch.run, is_guarded=True)


def _agent() -> Command:
    from hybridflow.cli import agent

    return Command("One host's part of a run on several hosts.", agent.add_arguments, agent.run)


def _sandbox() -> Command:
    from hybridflow.cli import sandbox

    description = "Run programs for the rewards and tools of runs on other machines, which have the same token."
    return Command(description, sandbox.add_arguments, sandbox.run, is_guarded=True)


def _token() -> Command:
    from hybridflow.cli import agent

    return Command(
        "Make the secret that lets the hosts of a run know each other.", agent.add_token_arguments, agent.token
    )


_COMMANDS: dict[str, Callable[[], Command]] = {
    "init": _init,
    "train": _train,
    "resume": _resume,
    "check": _check,
    "plan": _plan,
    "profile": _profile,
    "settings": _settings,
    "data": _data,
    "checkpoint": _checkpoint,
    "evaluate": _evaluate,
    "report": _report,
    "samples": _samples,
    "replay": _replay,
    "status": _status,
    "logs": _logs,
    "doctor": _doctor,
    "launch": _launch,
    "agent": _agent,
    "sandbox": _sandbox,
    "token": _token,
}
"""Module of each command, imported once it is run."""
