"""The heartbeat of a rank's process: a thread says once a second what its main thread is at."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from engine3d.progress import progress
from hybridflow.rundir.heartbeat import BEAT_S, Heartbeat, HeartbeatFile, heartbeat_path
from hybridflow.workers.flight_recorder import FlightRecorder

START = "start"
"""What a rank is at until its worker is built."""


class Pulse:
    """The heartbeat of this process, from now on.

    Args:
        role, rank: whose process this is.
        log_path: of its log, beside which the file is; no heartbeat if None.
    """

    def __init__(self, role: str, rank: int, log_path: Path | None) -> None:
        self._role, self._rank, self._host = role, rank, socket.gethostname()
        self._method, self._has_turn, self._since = START, True, time.time()
        self._usual_s: dict[str, float] = {}
        self._counting: set[str] = set()
        progress.begin()
        if log_path is not None:
            file, recorder = HeartbeatFile(heartbeat_path(log_path)), FlightRecorder(role, rank, log_path)
            file.write(self._beat())
            threading.Thread(target=self._go_on, args=(file, recorder), name="heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def at(self, method: str) -> Iterator[None]:
        """The block is a call of a method."""
        progress.begin()
        self._method, self._has_turn, self._since = method, True, time.time()
        try:
            yield
        finally:
            if progress.parts:
                self._counting.add(method)
            if method != START:  # a worker's own comes after that of its process, and loads and compiles as well
                self._usual_s[method] = max(self._usual_s.get(method, 0.0), progress.longest_pause_s)
            self._method, self._since = "", time.time()

    @contextlib.contextmanager
    def waiting_for_turn(self) -> Iterator[None]:
        """The block waits until the devices are free."""
        self._has_turn = False
        try:
            yield
        finally:
            progress.begin()
            self._has_turn, self._since = True, time.time()

    def _go_on(self, file: HeartbeatFile, recorder: FlightRecorder) -> None:
        while True:
            time.sleep(BEAT_S)
            with contextlib.suppress(OSError):  # a file system that fails is told of by what needs it
                if recorder.is_wanted():
                    recorder.write()
                    return  # what it said last is what it was at when the run failed
                file.write(self._beat())

    def _beat(self) -> Heartbeat:
        method, parts = self._method, progress.parts
        if parts:
            self._counting.add(method)
        now = time.time()
        return Heartbeat(
            role=self._role,
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            method=method,
            has_turn=self._has_turn,
            since=self._since,
            parts=parts,
            progressed=now - (time.monotonic() - progress.at),
            usual_s=self._usual_s.get(method),
            counts=method in self._counting,
            at=now,
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
        )
