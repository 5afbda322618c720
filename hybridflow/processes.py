"""The operating system's side of a role's processes on this machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import psutil

from engine3d.errors import EngineError
from hybridflow.rank_process import STACKS_SIGNAL

Processes = Sequence[psutil.Process]


def find_process(pid: int) -> psutil.Process | None:
    """A handle that stays with this process and never takes a later one of the same number for it."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def write_stacks(processes: Processes) -> None:
    """Have ranks write the stacks of all their threads into their logs."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(STACKS_SIGNAL)
    time.sleep(0.5)


def kill_trees(roots: Processes, timeout_s: float = 15.0) -> None:
    """Kill processes, all that they started, and what is left of that where the process itself is gone already.

    Raises:
        EngineError: some are still there after `timeout_s`.
    """
    if not roots:
        return
    doomed = {process.pid: process for process in roots}
    leaders = set(doomed)
    for process in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed |= {child.pid: child for child in process.children(recursive=True)}
    # Ray makes each worker the leader of a process group: its orphans are found by that.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) in leaders:
                doomed[process.pid] = process
    for process in doomed.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(list(doomed.values()), timeout=timeout_s)
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if alive:
        pids = ", ".join(str(process.pid) for process in alive)
        raise EngineError(f"processes {pids} did not end within {timeout_s:.0f} s of being killed")
