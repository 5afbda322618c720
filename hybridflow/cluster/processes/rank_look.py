"""Looks at processes of ranks on their own host, by the driver or the actor of the node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridflow.cluster.processes.process_tree import family, find_process, is_stopped, write_stacks
from hybridflow.rundir.status.heartbeat import Heartbeat, read_heartbeat


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Location of a rank.

    Args:
        role, rank: which it is.
        node: Ray's id of its node.
        address: of its host.
        pid: of its process, on its host.
        heartbeat: the file; None if it has none.
    """

    role: str
    rank: int
    node: str
    address: str
    pid: int
    heartbeat: str | None


@dataclass(frozen=True, slots=True)
class RankLook:
    """A rank at one moment. Ages are in seconds, by the clock of its host.

    Args:
        location: of the rank.
        is_there: whether its process is.
        stopped: processes of it, or that it has started, which stand still until they get SIGCONT.
        beat: what it said last; None if it has said nothing.
        beat_age_s: since it said so.
        pause_s: since it did a part of its work, or began it.
        cpu_s: CPU time of its process and of all that it has started and that is there.
        read_bytes: that these have read.
    """

    location: RankPlace
    is_there: bool
    stopped: tuple[int, ...]
    beat: Heartbeat | None
    beat_age_s: float
    pause_s: float
    cpu_s: float = 0.0
    read_bytes: int = 0


def look_here(locations: Iterable[RankPlace]) -> list[RankLook]:
    """Look at ranks on this host."""
    return [_look(location) for location in locations]


def write_stacks_here(locations: Sequence[RankPlace], wake: bool) -> None:
    """Ask ranks on this host, and all that they have started, to write their stacks.

    Args:
        locations: of the ranks.
        wake: continue those that are stopped, which write nothing otherwise.
    """
    processes = [process for location in locations if (process := find_process(location.pid)) is not None]
    write_stacks(processes, wake=wake)


def _look(location: RankPlace) -> RankLook:
    process = find_process(location.pid)
    members = family([process]) if process is not None else []
    beat = read_heartbeat(Path(location.heartbeat)) if location.heartbeat is not None else None
    if beat is not None and beat.pid != location.pid:
        beat = None  # of an earlier run in the same directory
    cpu_s, read_bytes = used_by(members)
    now = time.time()
    age_s = now - beat.at if beat is not None else 0.0
    return RankLook(
        location=location,
        is_there=process is not None,
        stopped=tuple(member.pid for member in members if is_stopped(member.pid)),
        beat=beat,
        beat_age_s=age_s,
        pause_s=now - beat.progressed if beat is not None else 0.0,
        cpu_s=cpu_s,
        read_bytes=read_bytes,
    )


def used_by(members: Iterable[psutil.Process]) -> tuple[float, int]:
    """CPU time in seconds, and bytes read, of processes."""
    cpu_s, read_bytes = 0.0, 0
    for process in members:
        with contextlib.suppress(psutil.Error):
            cpu_s += sum(process.cpu_times()[:4])  # with that of children that have ended, such as compilers
            counters = process.io_counters()
            read_bytes += max(counters.read_chars, counters.read_bytes)  # mapped files are only in the second
    return cpu_s, read_bytes
