"""What this process waits for: a line on stderr, and the stacks of all ranks, where no answer comes for long.

    with waits.on(ranks, method, count) as wait:
        ...
        wait.silent = [1, 3]        # the ranks that have not answered

A thread looks at the waits that are under way, so that it also sees one in which the main thread is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hybridflow.cluster.processes.process_tree import family, is_stopped, write_stacks
from hybridflow.errors.log import log
from hybridflow.rundir.progress import where_now
from hybridflow.workers.failure_diagnosis import where
from hybridflow.workers.ranks import Ranks

_LOOK_EVERY_S = 0.5
# A call that takes as long as one before is not stuck; twice as long may be.
_UNUSUAL = 2.0
_START = "start"
# Of one core, while a process imports libraries, loads weights or compiles.
_BUSY = 0.2
_DRIVER_STACKS = "driver-stacks.log"


@dataclass(eq=False)
class Wait:
    """A wait for the ranks of a call.

    Args:
        ranks, method: what is waited for.
        silent: the ranks that have not answered.
        begin: since when, in seconds since the epoch.
        answered: when a rank answered last, or the wait began, by the monotonic clock.
        limit_s: without an answer, after which it is told (again).
    """

    ranks: Ranks
    method: str
    silent: Sequence[int]
    limit_s: float
    begin: float = field(default_factory=time.time)
    answered: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0

    def progress(self, silent: Sequence[int]) -> None:
        """Take note of who has not answered."""
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

    def add(self, ranks: Ranks) -> None:
        """A group whose processes write their stacks when the run waits for long, whoever it waits for."""
        with self._changed:
            self._groups.add(ranks)

    @contextlib.contextmanager
    def on(self, ranks: Ranks, method: str, count: int) -> Iterator[Wait]:
        """Wait for the answers of `count` ranks to a call in the block."""
        kind = (ranks.role, method)
        quiet_s = max(ranks.quiet_s, _UNUSUAL * self._usual_s.get(kind, 0.0))
        wait = Wait(ranks, method, range(count), quiet_s)
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
            late = [wait for wait in waits if now - wait.answered >= wait.limit_s and not _starts(wait)]
            if late:
                self._tell(late)
            time.sleep(_LOOK_EVERY_S)

    def _tell(self, late: Sequence[Wait]) -> None:
        with self._changed:
            groups = list(self._groups)
        stopped = "".join(f"; {each}" for group in groups for each in _stopped(group))
        directories = sorted({group.log_dir for group in groups if group.log_dir is not None})
        write_stacks([process for group in groups for process in group.processes])
        with contextlib.suppress(OSError):  # where it cannot be written, the line still says who is waited for
            for directory in directories:
                _write_own_stacks(directory / _DRIVER_STACKS)
        stacks = f"; stacks: {directories[0]}" if directories else ""
        for wait in late:
            waited_s = time.monotonic() - wait.answered
            if not wait.silent or waited_s < wait.limit_s:
                continue  # it has been answered meanwhile
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
            who = where(wait.ranks.role, wait.method, wait.silent)
            line = f"{where_now()}: {who}: no answer since {since} ({waited_s:.0f} s){stopped}{stacks}"
            log.warning(line)
            wait.limit_s = 2 * waited_s


def _starts(wait: Wait) -> bool:
    """Whether ranks that are being built are at work, which takes as long as it takes; looks again later."""
    if wait.method != _START:
        return False
    used_s = 0.0
    for process in family(wait.ranks.processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s += sum(process.cpu_times()[:2])
    span_s = time.monotonic() - wait.answered
    busy = used_s - wait.cpu_s > _BUSY * span_s
    if busy:
        wait.cpu_s, wait.answered = used_s, time.monotonic()
    return busy


def _stopped(ranks: Ranks) -> Iterator[str]:
    """Which processes of a group's ranks, or of what they have started, stand still."""
    for process in family(ranks.processes):
        if is_stopped(process.pid):
            yield f"process {process.pid} of {ranks.role} is stopped (kill -CONT {process.pid})"


def _write_own_stacks(path: Path) -> None:
    with path.open("a") as file:
        print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)


waits = Waits()
"""Those of this process."""
