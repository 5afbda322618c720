"""The stacks of a process's threads, for who asks for them by a signal."""

from __future__ import annotations

import faulthandler
import signal

STACKS_SIGNAL = signal.SIGUSR2
"""A process of a run that gets this signal writes the stacks of all its threads into its log."""


def write_stacks_on_signal() -> None:
    """Have this process do so, whatever its main thread is at."""
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
