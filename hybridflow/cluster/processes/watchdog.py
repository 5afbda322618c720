"""Ends what a run has started once the run is gone, however it went: a program of its own, standard library only.

    python watchdog.py MARKER DIRECTORY [PROGRAM ...]

Waits until its standard input closes, which the death of the process at the other end does too. Then it kills every
process that belongs to the run, removes DIRECTORY, and runs the PROGRAMs, which remove what those
processes have left. To the run belongs who has MARKER (`NAME=value`) in its environment, who has a file in DIRECTORY
open for writing (a process that sets its title overwrites what others can see of its environment; one that only looks
at the files is somebody else's), and who is in the process group of one of these.

Until then, or the line `stop`, it reads lines. `PID NAME` tells of a process by whose death Ray may end the one at the
other end before that has said why; it is said here then, unless the line `end` has come before, and kept in the
directory that `directory PATH` says is the run's. Where no such process died first, the one at the other end was
killed, which is said where a run has such a directory. Who ends such processes because the other end is gone names them
in DIRECTORY/ended before: nobody can see which of two died first when both are gone. `within SECONDS` bounds a start,
and the end of one: after so long all that has started is killed, so that the process at the other end comes back from
where it waits for it, perhaps in C++ and without a thread that can run; `within 0` says that the start is over.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

WITHIN = "within"
DIRECTORY = "directory"
END = "end"
"""The line by which the process at the other end says that it needs no last word."""
STOP = "stop"
"""The line that is as good as the end of standard input, of which a process that was forked may have a copy."""
ENDED = "ended"
"""The file in DIRECTORY with ids of processes that did not die by themselves."""
DRIVER = "driver"
"""The file in DIRECTORY with the id of a driver that ends by itself when its launcher is gone."""
_KEEP = "hybridflow.rundir.status.first_failure"
"""The program that keeps what a run failed of; it imports more than this one."""
_LIMIT_S = 20.0
_LATER_S = 2.0
_DRIVER_S = 20.0


def run_processes(marker: str, directory: str) -> list[int]:
    """The processes of the run, but for the one that started it, which may be alive and have stopped Ray."""
    spared = {os.getpid(), os.getppid()}
    groups: dict[int, int] = {}
    members = set()
    for entry in Path("/proc").iterdir():
        # Gone meanwhile, or another user's; a zombie has neither environment nor files.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) not in spared:
                groups[int(entry.name)] = os.getpgid(int(entry.name))
                if any(_shows(thread, marker, directory) for thread in _threads(entry)):
                    members.add(int(entry.name))
    # Ray gives each worker a group of its own; the group of the daemons is that of the program which started the run.
    leaders = {pid for pid in members if groups[pid] == pid}
    return [pid for pid in groups if pid in members or groups[pid] in leaders]


def _threads(process: Path) -> Iterable[Path]:
    """The first, which shows what all have; where that has ended, each."""
    with contextlib.suppress(OSError):
        if (process / "environ").read_bytes():
            return [process]
    return (process / "task").iterdir()


def _shows(thread: Path, marker: str, directory: str) -> bool:
    with contextlib.suppress(OSError):
        if marker.encode() in (thread / "environ").read_bytes().split(b"\0"):
            return True
    with contextlib.suppress(OSError):
        for descriptor in (thread / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(descriptor.readlink()).startswith(f"{directory}/") and _writes(thread, descriptor.name):
                    return True
    return False


def _writes(thread: Path, descriptor: str) -> bool:
    """True if a descriptor was opened for writing."""
    for line in (thread / "fdinfo" / descriptor).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def kill_run(marker: str, directory: str) -> None:
    """Kill them until none is left: one may have started another meanwhile. Their files are closed then."""
    deadline = time.monotonic() + _LIMIT_S
    killed: set[int] = set()
    while (pids := run_processes(marker, directory)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(0.05)
    # A process that ends loses what others can see of it before it gives up its locks.
    while not all(map(_has_ended, killed)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    """True if a process has closed its files: all of its threads are gone, its first one may be waited for."""
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        # The first thread can end, and look like the end of all, while others still hold what they share.
        return state in "ZX" and len(list((process / "task").iterdir())) <= 1
    except OSError:
        return True


def listen(marker: str, directory: str) -> tuple[str | None, str | None]:
    """Wait until standard input closes; the cause if it was not said, and the run's directory."""
    inbox, spoken, starter = b"", False, os.getppid()
    died: tuple[int, str] | None = None
    deadline: float | None = None
    run: str | None = None
    names: dict[int, tuple[int, str]] = {}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        ready = dict(poll.poll(None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))))
        if deadline is not None and time.monotonic() >= deadline:
            deadline = None
            kill_run(marker, directory)
        for descriptor in ready.keys() & names.keys():
            died = died or names[descriptor]
            poll.unregister(descriptor)
        if 0 not in ready:
            continue
        data = os.read(0, 4096)
        *lines, inbox = (inbox + data).split(b"\n")
        for line in lines:
            if line == END.encode():
                spoken = True
                continue
            if line == STOP.encode():
                data = b""
                continue
            pid, _, name = line.decode().partition(" ")
            if pid == WITHIN:
                deadline = time.monotonic() + float(name) if float(name) else None
                continue
            if pid == DIRECTORY:
                run = name
                continue
            try:
                descriptor = os.pidfd_open(int(pid))
            except ProcessLookupError:  # it was alive when it was named
                died = died or (int(pid), name)
            except (OSError, ValueError):  # it may not be watched
                pass
            else:
                names[descriptor] = int(pid), name
                poll.register(descriptor, select.POLLIN)
        if not data:
            return None if spoken else _cause(died, starter, Path(directory), run), run


def _cause(died: tuple[int, str] | None, starter: int, directory: Path, run: str | None) -> str | None:
    """The cause of the end of the process at the other end, which has given none."""
    ended: list[str] = []
    with contextlib.suppress(OSError):
        ended = (directory / ENDED).read_text().split()
    if died is not None and str(died[0]) not in ended:
        return f"{died[1]} (process {died[0]}) died, and the run ended without a word: by Ray, or both were killed"
    if run is None:
        return None
    return f"the driver (process {starter}) was killed, or ended without a word"


def main() -> None:
    marker, directory, *programs = sys.argv[1:]
    # A scheduler that ends a job sends its signal to every process of it; this one is to end last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    starter = os.getppid()
    cause, run = listen(marker, directory)
    if cause is not None:
        print(f"hybridflow: {cause}", file=sys.stderr, flush=True)
    _wait_for_driver(Path(directory))
    kill_run(marker, directory)
    if cause is not None and run is not None:
        _keep(run, cause)
    shutil.rmtree(directory, ignore_errors=True)
    _run(programs)
    if os.getppid() != starter:
        # Nobody waits for this process. One of the run's that others have ended may have held its locks until now.
        time.sleep(_LATER_S)
        _run(programs)


def _wait_for_driver(directory: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # there is none, or it has ended
        select.select([os.pidfd_open(int((directory / DRIVER).read_text()))], [], [], _DRIVER_S)


def _keep(run: str, cause: str) -> None:
    """Write the card of the run's failure, in the environment that the run had."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # the cause has been said
        command = [sys.executable, "-m", _KEEP, run, cause]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)


def _run(programs: list[str]) -> None:
    for program in programs:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
