"""A run of several actors: a command for each, all at the same time, whose output, signals and ends are this one's.

Each actor has a driver of its own, as if it were alone: an actor that fails takes no other's process with it before
that has saved, and none waits for another's rollout.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

from hybridflow.cluster.processes.termination import STOPPED_AFTER_SAVING, termination
from hybridflow.errors.log import log

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe

PARENT = "HYBRIDFLOW_ACTORS"
"""Environment variable with the number of a pipe whose other end the command of all actors holds."""
_LOOK_S = 0.1
_MARGIN_S = 15.0


def train(recipes: Mapping[str, Recipe], words: Sequence[str]) -> int:
    """Train every actor, and end when all have; the exit code.

    Where one fails the others are ended, as SIGTERM does, and its exit code is that of the run.

    Args:
        recipes: of each actor, by its name.
        words: of the command line behind `train`.
    """
    stop_s = max(recipe.limits.stop_s for recipe in recipes.values())
    saving = [recipe.checkpoint.on_stop_s for recipe in recipes.values() if recipe.checkpoint.on_stop_s is not None]
    limit_s = max(saving) + stop_s + _MARGIN_S if saving else None
    termination.grace_s = stop_s + _MARGIN_S
    width = max(map(len, recipes))
    with _Commands(words, list(recipes), width, limit_s or termination.grace_s) as commands, termination.saves(limit_s):
        signalled = False
        while commands.running():
            if termination.stop_requested and not signalled:
                signalled = True
                commands.send(_signal_that_came())
            if termination.take_save_request():
                commands.send(signal.SIGUSR1)
            if commands.failed() is not None and not signalled:
                break
            time.sleep(_LOOK_S)
        if signalled:
            unsaved = [name for name, code in commands.codes.items() if code not in (0, STOPPED_AFTER_SAVING)]
            termination.end_asked(None if unsaved else "the checkpoint of every actor is whole")
        failed = commands.failed()
        if failed is None:
            return 0
        others = "; the others are ended" if commands.running() else ""
        log.error(f"actor {failed} failed with exit code {commands.codes[failed]}{others}")
        return commands.codes[failed]


def _signal_that_came() -> signal.Signals:
    assert termination.cause is not None
    code = termination.cause.code - 128
    return signal.Signals(code) if code in (signal.SIGINT, signal.SIGTERM) else signal.SIGTERM


class _Commands:
    """The command of each actor.

    Args:
        words: of all of them.
        names: of the actors.
        width: of a name before each line of output.
        end_s: that one has to end in an orderly way.
    """

    def __init__(self, words: Sequence[str], names: Sequence[str], width: int, end_s: float) -> None:
        self._words, self._names, self._width, self._end_s = words, names, width, end_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._alive: int | None = None
        self.codes: dict[str, int] = {}
        """Exit codes of those that have ended, in the order in which they did."""

    def __enter__(self) -> _Commands:
        reading, self._alive = os.pipe()
        try:
            for name in self._names:
                self._start(name, reading)
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(reading)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for thread in self._threads:
            thread.join(_MARGIN_S)
        if self._alive is not None:
            os.close(self._alive)

    def _start(self, name: str, reading: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridflow", "train", *self._words, "--actor", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[reading],
            env=os.environ | {PARENT: str(reading), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for this process, which passes it on
        )
        self._processes[name] = process
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            thread = threading.Thread(target=self._pass_on, args=(name, stream, out), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _pass_on(self, name: str, stream: IO[bytes], out: IO[str]) -> None:
        prefix = f"[{name}]".ljust(self._width + 2)
        for line in stream:
            with contextlib.suppress(OSError, ValueError):  # nobody reads: training continues
                out.write(f"{prefix} {line.decode(errors='replace')}")
                out.flush()

    def running(self) -> list[str]:
        """Return the commands that have not ended."""
        for name, process in self._processes.items():
            if name not in self.codes and (code := process.poll()) is not None:
                self.codes[name] = code if code >= 0 else 128 - code
        return [name for name in self._names if name not in self.codes]

    def failed(self) -> str | None:
        """The first that has ended otherwise than well."""
        return next((name for name, code in self.codes.items() if code), None)

    def send(self, number: signal.Signals) -> None:
        """Send all that run a signal."""
        for name in self.running():
            with contextlib.suppress(ProcessLookupError):
                self._processes[name].send_signal(number)

    def end(self) -> None:
        """End those that run: as SIGTERM does, or by force where that takes too long."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + self._end_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for name in self.running():
            self._processes[name].kill()
            self._processes[name].wait()
        self.running()


def end_with_parent() -> None:
    """End this command when that of all actors is gone; nothing in a command of its own."""
    number = os.environ.pop(PARENT, None)
    if number is None:
        return
    reading = int(number)
    os.set_inheritable(reading, False)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(reading, 1)
        termination.end("hybridflow: the command that trains all actors is gone")

    threading.Thread(target=watch, name="parent", daemon=True).start()
