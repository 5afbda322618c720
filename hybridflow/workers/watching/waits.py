"""Waits of this process: progress where one takes long, a line on stderr and stacks of all ranks where nothing moves.

    with waits.on(ranks, method, called) as wait:
        ...
        wait.silent = [1, 3]        # the ranks that have not answered

A thread looks at the waits in flight, so that it also sees one in which the main thread is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.cluster.processes.rank_look import RankLook
from hybridflow.cluster.ray import node_actors
from hybridflow.errors.log import log
from hybridflow.rundir.status.progress import where_now
from hybridflow.workers.failure_diagnosis import where
from hybridflow.workers.ranks import Ranks
from hybridflow.workers.watching.call_progress import (
    Standstill,
    Usage,
    amount_done,
    is_first_part,
    moving,
    standstill,
    starting_stage,
)
from hybridflow.workers.watching.flight_recorder import request_recordings, wait_for_recordings

_LOOK_EVERY_S = 0.5
# A call that takes as long as one before is not stuck; twice as long may be.
_UNUSUAL = 2.0
_START = "start"
_JUDGE_EVERY_S = 5.0
DRIVER_STACKS = "driver.stacks"
"""File with the driver's stacks, among the logs."""


class StandsStillError(Exception):
    """A call makes no progress.

    Args:
        verdict: the rank that keeps it waiting, and the reason.
        ranks: the group of that rank.
    """

    def __init__(self, verdict: Standstill, ranks: Ranks) -> None:
        super().__init__(verdict.reason)
        self.verdict, self.ranks = verdict, ranks


@dataclass(eq=False)
class Wait:
    """A wait for the ranks of a call.

    Args:
        ranks, method: the call.
        silent: the ranks that have not answered.
        begin: begin of the wait, in seconds since the epoch.
        answered: last answer of a rank, or begin of the wait, by the monotonic clock.
        limit_s: without an answer, after which it is reported (again).
        verdict: reason of a standstill, and the group of the rank that causes it.
        usage: of the silent ranks at the last look.
        reported: seconds from the begin to the last line about its progress.
    """

    ranks: Ranks
    method: str
    silent: Sequence[int]
    limit_s: float
    verdict: tuple[Standstill, Ranks] | None = None
    begin: float = field(default_factory=time.time)
    answered: float = field(default_factory=time.monotonic)
    usage: Usage | None = None
    reported: float = 0.0

    def progress(self, silent: Sequence[int]) -> None:
        """Note the ranks that have not answered.

        Raises:
            StandsStillError: the call makes no progress.
        """
        if self.verdict is not None:
            raise StandsStillError(*self.verdict)
        if len(silent) < len(self.silent):
            self.answered = time.monotonic()
        self.silent = silent


class Waits:
    """The waits of this process. Threads may share it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: set[Wait] = set()
        self._groups: weakref.WeakSet[Ranks] = weakref.WeakSet()
        self._usual_s: dict[tuple[str, str], float] = {}
        self._thread: threading.Thread | None = None
        self._look_at = 0.0
        self._stopped: set[tuple[str, int]] = set()
        self._has_collected = False

    def add(self, ranks: Ranks) -> None:
        """Add a group whose processes write their stacks when the run waits for long, for any group."""
        with self._changed:
            self._groups.add(ranks)
            self._has_collected = False

    def collect_stacks(self, *, again: bool = True) -> None:
        """Make every process of the run write its stacks, on all hosts, before a failure ends the run.

        Args:
            again: also if they wrote them since the last group was added.
        """
        with self._changed:
            if self._has_collected and not again:
                return
            self._has_collected = True
        groups = self._there()
        directories = {group.log_dir for group in groups if group.log_dir is not None}
        requested = [request_recordings(directory) for directory in directories]
        for directory in directories:
            node_actors.request_recordings(directory.resolve().parent)
        for directory in filter(None, requested):
            wait_for_recordings(directory, sum(len(group.actors) for group in groups))
        self._write_stacks(wake=True)  # stopped processes continue from here, and others perhaps with them
        node_actors.copy_logs()

    def _write_stacks(self, *, wake: bool) -> list[Path]:
        """Write the stacks of all processes. Return the directories."""
        groups = self._there()
        node_actors.collect_stacks([location for group in groups for location in group.locations], wake=wake)
        directories = sorted({group.log_dir for group in groups if group.log_dir is not None})
        with contextlib.suppress(OSError):  # without the file, a line still names the awaited ranks
            for directory in directories:
                _write_own_stacks(directory / DRIVER_STACKS)
        return directories

    def _there(self) -> list[Ranks]:
        with self._changed:
            return [group for group in self._groups if group.is_alive]

    @contextlib.contextmanager
    def on(self, ranks: Ranks, method: str, called: Sequence[int]) -> Iterator[Wait]:
        """Wait for the answers of the ranks that were `called`, by their numbers, in the block."""
        kind = (ranks.role, method)
        quiet_s = max(ranks.quiet_s, _UNUSUAL * self._usual_s.get(kind, 0.0))
        wait = Wait(ranks, method, called, quiet_s)
        with self._changed:
            self._waits.add(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="waits", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield wait
            self._usual_s[kind] = max(self._usual_s.get(kind, 0.0), time.time() - wait.begin)
        finally:
            with self._changed:
                self._waits.discard(wait)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waits)
                waits = list(self._waits)
            now = time.monotonic()
            late = [wait for wait in waits if now - wait.answered >= wait.limit_s]
            unseen = [wait for wait in waits if wait.usage is None and now - wait.answered >= wait.limit_s / 2]
            self._judge(waits)
            if late or unseen:
                looks = node_actors.look_at([location for group in self._there() for location in group.locations])
                for wait in unseen:
                    wait.usage = _usage(wait, looks)
                if late:
                    self._report(late, looks)
            time.sleep(_LOOK_EVERY_S)

    def _judge(self, waits: Sequence[Wait]) -> None:
        """Look for the rank that keeps calls waiting, where they have been silent for long."""
        now = time.monotonic()
        due = [
            (wait, limits)
            for wait in waits
            if (limits := wait.ranks.progress) is not None and now - wait.answered >= limits.progress_s / 2
        ]
        if not due:
            self._stopped = set()
        if not due or now < self._look_at:
            return
        groups = self._there()
        looks = node_actors.look_at([location for group in groups for location in group.locations])
        now = time.monotonic()
        for wait, limits in due:
            awaited = [look for look in looks if _is_of(look, wait)]
            others = [look for look in looks if not _is_of(look, wait)]
            verdict = standstill(awaited, others, now - wait.answered, limits, self._stopped)
            blamed = [group for group in groups if verdict is not None and group.role == verdict.location.role]
            if verdict is not None and blamed:
                wait.verdict = verdict, blamed[0]
        self._stopped = {(look.location.address, pid) for look in looks for pid in look.stopped}
        self._look_at = now + min(_JUDGE_EVERY_S, min(limits.progress_s for _, limits in due) / 8)

    def _report(self, late: Sequence[Wait], looks: Sequence[RankLook]) -> None:
        """Log the progress of late calls, and who is waited for where there is none, after all have written stacks."""
        still = [wait for wait in late if not self._progresses(wait, looks)]
        if not still:
            return
        stopped = "".join(f"; {process}" for look in looks for process in _stopped(look))
        directories = self._write_stacks(wake=False)
        stacks = f"; stacks: {directories[0]}" if directories else ""
        for wait in still:
            waited_s = time.monotonic() - wait.answered
            if not wait.silent or waited_s < wait.limit_s:
                continue  # it has been answered meanwhile
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
            who = where(wait.ranks.role, wait.method, wait.silent)
            line = f"{where_now()}: {who}: no answer since {since} ({waited_s:.0f} s){stopped}{stacks}"
            log.warning(line)
            wait.limit_s = 2 * waited_s

    def _progresses(self, wait: Wait, looks: Sequence[RankLook]) -> bool:
        """True if the ranks of a call make progress, which is logged at 1, 2, 4, ... times its limit."""
        role, now = wait.ranks.role, time.monotonic()
        awaited = [look for look in looks if _is_of(look, wait)]
        others = [look for look in looks if not _is_of(look, wait)]
        usage, before = _usage(wait, looks), wait.usage
        busy = before is not None and usage.is_busy_since(before) and not any(look.stopped for look in looks)
        wait.usage = usage
        if wait.method == _START and busy:
            text = "waiting for its processes to start"
            if wait.ranks.locations:
                text = starting_stage(wait.ranks.log_dir, role, wait.silent)
            wait.answered = now  # as long as they are busy, a start takes as long as it takes
        elif at_work := moving(awaited, others, wait.ranks.quiet_s):
            role, method = at_work[0].location.role, at_work[0].beat.method if at_work[0].beat is not None else ""
            began = min(look.beat.since for look in at_work if look.beat is not None)
            text = amount_done([look for look in looks if look.location.role == role], method, began)
            wait.limit_s = now - wait.answered + wait.ranks.quiet_s
        elif not wait.reported and busy and is_first_part(awaited):
            text = "first call, nothing done yet: kernels may be compiled"
            wait.limit_s = now - wait.answered + wait.ranks.quiet_s
        else:
            return False
        waited_s = time.time() - wait.begin
        if waited_s >= 2 * wait.reported:
            wait.reported = waited_s
            position = where_now()
            named = "" if position.endswith(role) or text.startswith("engine ") else f"{role}: "
            log.info(f"{position}: {named}{text}, {waited_s:.0f} s")
        return True


def _usage(wait: Wait, looks: Sequence[RankLook]) -> Usage:
    """Return the usage of the silent ranks of a call, or of all that might become their processes."""
    now = time.monotonic()
    if wait.ranks.locations:
        return Usage.of([look for look in looks if _is_of(look, wait)], now)
    return Usage.of_descendants(now)


def _is_of(look: RankLook, wait: Wait) -> bool:
    """True if a look is of a rank that has not answered."""
    return look.location.role == wait.ranks.role and look.location.rank in wait.silent


def _stopped(look: RankLook) -> Iterator[str]:
    """Describe the stopped processes of a rank and of its descendants."""
    host = f" on {look.beat.host}" if look.beat is not None and look.beat.host != socket.gethostname() else ""
    for pid in look.stopped:
        yield f"process {pid} of {look.location.role} is stopped{host} (kill -CONT {pid})"


def _write_own_stacks(path: Path) -> None:
    with path.open("a") as file:
        print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)


waits = Waits()
"""Waits of this process."""
