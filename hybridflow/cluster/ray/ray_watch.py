"""The processes of a Ray that this process has started: found at once when one dies, and when one is stopped.

Ray itself tells nobody. Its C++ code ends the driver without a word when the raylet is gone, waits a minute for a GCS
server that is gone, and waits for a stopped raylet for ever, deaf to signals. So they are watched from a thread; the
run's watchdog, which is a process of its own, speaks where Ray ends the driver before that thread has spoken.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping

from engine3d.errors import EngineError
from hybridflow.cluster.processes.process_tree import is_stopped
from hybridflow.errors.log import log

_LOOK_EVERY_S = 1.0
# One that was asked to end may be so with all of its session, this process included: that is the cause then.
_ASKED_S = 0.5


class RayWatch:
    """Watches processes until `close`.

    Args:
        processes: process ids, by what they are called in messages.
        ends: descriptor that can be read once one of them has ended.
        read_end: which one did then, and how; and whether it may have been asked to.
        lost: is called with one line, in another thread, when one of them is gone.
        quiet_s: how long one may be stopped before a line on stderr says so.
        limit_s: how long it may be stopped before it counts as gone.
    """

    def __init__(
        self,
        processes: Mapping[str, int],
        ends: int,
        read_end: Callable[[], tuple[str, bool]],
        lost: Callable[[str], object],
        *,
        quiet_s: float,
        limit_s: float,
    ) -> None:
        self.lost: str | None = None
        """One line, once a process is gone."""
        self._call, self._quiet_s, self._limit_s = lost, quiet_s, limit_s
        self._processes, self._ends, self._read_end = processes, ends, read_end
        self._stopped: dict[str, float] = {}
        self._reported: set[str] = set()
        self._closing, closing = os.pipe()
        self._close: int | None = closing
        self._thread = threading.Thread(target=self._watch, name="ray watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise EngineError if a process is gone."""
        if self.lost is not None:
            raise EngineError(self.lost)

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        closing, self._close = self._close, None
        if closing is not None:
            os.close(closing)  # the thread sees it
            self._thread.join(_LOOK_EVERY_S)

    def _watch(self) -> None:
        try:
            while self.lost is None:
                ready, _, _ = select.select([self._closing, self._ends], [], [], _LOOK_EVERY_S)
                if self._closing in ready:
                    return
                self.lost = self._gone() if ready else self._stopped_too_long()
            self._call(self.lost)
        finally:
            os.close(self._closing)

    def _gone(self) -> str:
        how, was_requested = self._read_end()
        if was_requested:
            time.sleep(_ASKED_S)
        return f"{how}, and the run cannot go on without it"

    def _stopped_too_long(self) -> str | None:
        for name, pid in self._processes.items():
            if not is_stopped(pid):
                self._stopped.pop(name, None)
                self._reported.discard(name)
                continue
            stopped_s = time.time() - self._stopped.setdefault(name, time.time())
            since = time.strftime("%H:%M:%S", time.localtime(self._stopped[name]))
            if stopped_s > self._limit_s:
                return f"{name} (process {pid}) has been stopped for {self._limit_s:g} s (limits.call_s)"
            if stopped_s > self._quiet_s and name not in self._reported:
                self._reported.add(name)
                line = f"{name} (process {pid}) has been stopped since {since}, as by SIGSTOP; the run waits for it"
                log.warning(f"{line} (kill -CONT {pid})")
        return None
