"""Resources that the processes of a program use, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ANONYMOUS = ("RssAnon:", "RssShmem:", "HugetlbPages:")
_SHARED_OUT = ("Pss_Anon:", "Pss_Shmem:", "Private_Hugetlb:", "Shared_Hugetlb:")
"""Lines of memory without files: of a process's status, and of its maps, where shared pages are divided."""
_TICKS, _THREADS = slice(10, 14), 16
"""Words of `/proc/PID/stat` behind the state: utime, stime, cutime and cstime, and num_threads."""


@dataclass(frozen=True)
class ProgramUsage:
    """Use of resources by some processes.

    Args:
        processes: number of processes and threads.
        memory_bytes: memory without files. Pages that processes share count for each.
        computed_s: time on a core, of all of them and of children that they have waited for, in seconds.
        ready: true if a thread of them is on a core or waits for one.
    """

    processes: int
    memory_bytes: int
    computed_s: float
    ready: bool


def usage_of(pids: list[int]) -> ProgramUsage:
    """Use of resources of processes. Those that have ended count for nothing."""
    threads, memory, ticks, ready = 0, 0, 0, False
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, words = _stat(Path(f"/proc/{pid}/stat"))
            count = int(words[_THREADS])
            threads += count
            ticks += sum(map(int, words[_TICKS]))
            ready = ready or state == "R" or (count > 1 and _thread_ready(pid))
            memory += _kilobytes(Path(f"/proc/{pid}/status"), _ANONYMOUS) * 1024
    return ProgramUsage(threads, memory, ticks / os.sysconf("SC_CLK_TCK"), ready)


def _stat(path: Path) -> tuple[str, list[str]]:
    """State of a process or thread, and the words of its file behind that."""
    state, *words = path.read_text().rpartition(")")[2].split()
    return state, words


def _thread_ready(pid: int) -> bool:
    return any(_stat(thread / "stat")[0] == "R" for thread in Path(f"/proc/{pid}/task").iterdir())


def shared_memory_bytes(pids: list[int]) -> int:
    """Memory of processes without files, of which shared pages count once. Slower than `usage_of`.

    Pages of a process count for each where they cannot be read, as for root without the right to trace others.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            try:
                total += _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), _SHARED_OUT) * 1024
            except PermissionError:
                total += _kilobytes(Path(f"/proc/{pid}/status"), _ANONYMOUS) * 1024
    return total


def _kilobytes(path: Path, names: tuple[str, ...]) -> int:
    """Sum of the lines of a file that begin with one of these names."""
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(names))


def descendants(pid: int) -> list[int]:
    """Descendants of a process, the nearest first."""
    pids = list(children(pid))
    for child in pids:
        pids += children(child)
    return pids


def children(pid: int) -> Iterator[int]:
    """Children of a process: of each of its threads."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (thread / "children").read_text().split())


def killed_for_memory() -> int:
    """Processes that the kernel has killed so far since the machine had no memory left."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
