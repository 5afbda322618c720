"""What the processes of ranks are at, seen on their own host: by the driver, by an agent, or by a task of Ray's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hybridflow.cluster.processes.process_tree import family, find_process, is_stopped, write_stacks
from hybridflow.rundir.heartbeat import Heartbeat, read_heartbeat


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is.

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
        place: which rank.
        is_there: whether its process is.
        stopped: processes of it, or that it has started, which stand still until they get SIGCONT.
        beat: what it said last; None if it has said nothing.
        beat_age_s: since it said so.
        pause_s: since it did a part of its work, or began it.
        cpu_s: CPU time of its process and of all that it has started and that is there.
        read_bytes: that these have read.
    """

    place: RankPlace
    is_there: bool
    stopped: tuple[int, ...]
    beat: Heartbeat | None
    beat_age_s: float
    pause_s: float
    cpu_s: float = 0.0
    read_bytes: int = 0


def look_here(places: Iterable[RankPlace]) -> list[RankLook]:
    """Look at ranks on this host."""
    return [_look(place) for place in places]


def looks_as_json(looks: Iterable[RankLook]) -> list[dict[str, Any]]:
    """To be sent as JSON."""
    return [asdict(look) for look in looks]


def looks_from_json(items: Iterable[Mapping[str, Any]]) -> list[RankLook]:
    """What `looks_as_json` made."""
    return [
        RankLook(
            place=RankPlace(**item["place"]),
            is_there=item["is_there"],
            stopped=tuple(item["stopped"]),
            beat=None if item["beat"] is None else Heartbeat(**item["beat"]),
            beat_age_s=item["beat_age_s"],
            pause_s=item["pause_s"],
            cpu_s=item["cpu_s"],
            read_bytes=item["read_bytes"],
        )
        for item in items
    ]


def write_stacks_here(places: Sequence[RankPlace], wake: bool) -> None:
    """Have ranks on this host, and all that they have started, write their stacks.

    Args:
        places: of the ranks.
        wake: let those go on that are stopped, which write nothing otherwise.
    """
    found = [process for place in places if (process := find_process(place.pid)) is not None]
    write_stacks(found, wake=wake)


def _look(place: RankPlace) -> RankLook:
    process = find_process(place.pid)
    members = family([process]) if process is not None else []
    beat = read_heartbeat(Path(place.heartbeat)) if place.heartbeat is not None else None
    if beat is not None and beat.pid != place.pid:
        beat = None  # of an earlier run in the same directory
    cpu_s, read_bytes = used_by(members)
    now = time.time()
    age_s = now - beat.at if beat is not None else 0.0
    return RankLook(
        place=place,
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
