"""The stacks of a process's threads, for who asks for them by a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""A process of a run that gets this signal writes the stacks of all its threads."""
STACKS_VARIABLE = "ENGINE3D_STACKS"
"""Environment variable with the file that they go to; stderr without it."""
STACKS = ".stacks"
"""Of the names of such files, which are beside logs."""


def stacks_path(log_path: Path) -> Path:
    """Where the stacks of the processes that write a log go: into a file beside it, so that its last lines stay."""
    return log_path.with_suffix(STACKS)


def write_stacks_on_signal() -> None:
    """Have this process do so, whatever its main thread is at."""
    path = os.environ.get(STACKS_VARIABLE)
    # Open as long as the process is: faulthandler writes where it can no longer open anything.
    file = 2 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
