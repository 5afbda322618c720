"""The operating system's side of a role's processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from engine3d.errors import EngineError
from engine3d.stacks import STACKS_SIGNAL, request_stacks

Processes = Sequence[psutil.Process]

_ANSWER_S = 2.0
_WRITING_S = 0.3


def find_process(pid: int) -> psutil.Process | None:
    """A handle that stays with this process and never takes a later one of the same number for it."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def write_stacks(processes: Processes, *, wake: bool = False) -> None:
    """Ask ranks, and what they have started, to write the stacks of all their threads beside their logs.

    Those that do not answer, since their threads that know of it get no turn, get a signal. Other programs do not, also
    where they catch it: LLVM's, such as CUDA's compiler, would end.

    Args:
        processes: of the ranks.
        wake: let those go on that are stopped, which write nothing otherwise.
    """
    able = {process.pid: process for process in family(processes) if catches(process.pid, STACKS_SIGNAL)}
    stopped = [pid for pid in able if is_stopped(pid)]
    if wake:
        for pid in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                able[pid].send_signal(signal.SIGCONT)
        stopped = []
    request_stacks(stopped, 0.0)  # they write when they go on
    silent = request_stacks([pid for pid in able if pid not in stopped], _ANSWER_S)
    for pid in silent:
        if catches(pid, STACKS_SIGNAL):  # and has not become another program
            with contextlib.suppress(psutil.NoSuchProcess):
                able[pid].send_signal(STACKS_SIGNAL)
    if silent:
        time.sleep(_WRITING_S)


def family(roots: Processes) -> list[psutil.Process]:
    """Processes that are there, and all that they have started."""
    members: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            members |= {member.pid: member for member in (root, *root.children(recursive=True))}
    return list(members.values())


def is_stopped(pid: int) -> bool:
    """True if a process stands still until it gets SIGCONT, or a debugger continues it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler of a signal, which would end it otherwise."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def kill_trees(roots: Processes, timeout_s: float = 120.0) -> None:
    """Kill processes, all that they started, and what is left of that where the process itself is gone already.

    A trainer's rank that is killed with tens of GB of page-locked memory is there until the system has taken it back,
    which was seen to take longer than 15 s.

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
