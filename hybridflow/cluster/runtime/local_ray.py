"""A Ray of this process's own: started on this machine, watched, and ended to the last process."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import ray

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError, first_line
from engine3d.rollout.host import run_files
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes import orphans, watchdog
from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.runtime import ray_head
from hybridflow.cluster.runtime.private_ray import LOOPBACK, PrivateRay, driver_imports, on_loopback
from hybridflow.cluster.runtime.ray_watch import RayWatch
from hybridflow.errors.log import log

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Arguments of `ray.init`: no worker output on the console."""

# In the environment of everything that a local Ray starts, and everything that starts in turn.
_MARKER = "HYBRIDFLOW_RAY"
_STOP_LIMIT_S = 30.0
# Limits of Ray's own start that can be set, in whole seconds. Others are in its code, of 30 s and more: an attempt that
# ended sooner did not end for want of time.
_START_LIMITS = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s")
_LEAST_OWN_LIMIT_S = 20.0
# After the limit of Ray's start: a thread says so first, unless Ray keeps all threads of this process from running.
_GIL_S = 5.0
_PARTS = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS server"}
# The head tells how a process ended as soon as it has.
_TOLD_S = 1.0


class LocalRay:
    """A Ray for this process, in a `with` block or from `start` to `stop`.

    It starts quietly: no dashboard, no usage statistics, its files in a directory of its own that goes when it stops. A
    watchdog ends all that it started when this process is gone, even by SIGKILL.

    Args:
        cpus: CPU slots that it has; more than there are cores is fine.
        object_store_bytes: shared memory for data between roles; Ray's own choice (30 % of memory) if None.
        limits: how long the start may take, and how long a process of Ray may be stopped; the defaults if None.

    Raises:
        EngineError: Ray did not start.
    """

    def __init__(self, *, cpus: int, object_store_bytes: int | None = None, limits: LimitsConfig | None = None) -> None:
        self._cpus, self._object_store_bytes, self._limits = cpus, object_store_bytes, limits or LimitsConfig()
        self._directory = ""
        self._owned: TextIO | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._private: PrivateRay | None = None
        self._head: _Head | None = None
        self._watch: RayWatch | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_whole(self) -> bool:
        """Whether none of its parts is gone."""
        return self._watch is None or self._watch.lost is None

    def check(self) -> None:
        """Raise EngineError if a part of it is gone."""
        if self._watch is not None:
            self._watch.check()

    def store_file(self, name: str) -> Path:
        """A new file in which ranks can meet."""
        assert self._private is not None
        return self._private.store_file(name)

    def start(self) -> None:
        """Start it, again where it gave up by one of Ray's own limits before `limits.ray_start_s`."""
        for name in _START_LIMITS:
            os.environ.setdefault(name, str(math.ceil(self._limits.ray_start_s)))
        begin = time.monotonic()
        deadline = begin + self._limits.ray_start_s
        for attempt in itertools.count(1):
            since = time.monotonic()
            try:
                self._start_once(deadline)
                return
            except EngineError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise EngineError(_too_long(self._limits.ray_start_s)) from error
                took = f"{now - begin:.0f} s" if attempt == 1 else f"{now - begin:.0f} s and {attempt} attempts"
                if now - since < _LEAST_OWN_LIMIT_S:
                    limit = f"limits.ray_start_s={self._limits.ray_start_s:g}"
                    raise EngineError(f"{error} (after {took}; {limit})") from error
                line = f"{error}, after {took}; trying again, for {deadline - now:.0f} s more"
                log.warning(line)

    def stop(self) -> None:
        """Stop it, to the last process. Idempotent."""
        whole = self.is_whole
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._tell_watchdog(watchdog.END)
        if whole:
            ray.shutdown()  # would wait for a minute for what is gone
        if self._private is not None:
            self._private.close(forget=whole)
            self._private = None
        if self._watchdog is not None:
            del os.environ[_MARKER]
            with cleaning("hybridflow: Ray"):
                self._end()
            termination.remove_resort(self._end)
            self._watchdog = None
        if self._head is not None:
            self._head.close()
            self._head = None
        if self._owned is not None:
            orphans.give_up(self._owned)
            self._owned = None

    def _start_once(self, deadline: float) -> None:
        self._directory, self._owned = orphans.run_directory(orphans.parent())
        marker = f"{_MARKER}={self._directory}"
        command = [sys.executable, "-I", watchdog.__file__, marker, self._directory, run_files.__file__]
        # A session of its own: Ctrl-C is not for the watchdog.
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[_MARKER] = self._directory
        termination.add_resort(self._end)
        termination.before_force = lambda: self._tell_watchdog(watchdog.END)
        left_s = deadline - time.monotonic()
        self._tell_watchdog(f"{watchdog.WITHIN} {left_s + _GIL_S:g}")
        try:
            self._private = PrivateRay(Path(self._directory))
            self._head = _Head(
                Path(self._directory),
                path=[entry or str(Path.cwd()) for entry in sys.path],
                directory=str(self._private.ray_directory),
                address=LOOPBACK,
                cpus=self._cpus,
                object_store_bytes=self._object_store_bytes,
            )
            started = self._head.started(deadline)
            with self._bounded(deadline), on_loopback():
                ray.init(
                    address=started["gcs_address"],
                    _node_ip_address=LOOPBACK,
                    job_config=driver_imports(),
                    **QUIET,
                )
            self._tell_watchdog(f"{watchdog.WITHIN} 0")
            parts = {_PARTS[name]: pid for name, pid in started["processes"].items() if name in _PARTS}
            for name, pid in parts.items():
                self._tell_watchdog(f"{pid} {name}")
            limits = self._limits
            self._watch = RayWatch(
                parts, self._lost, quiet_s=limits.quiet_s, limit_s=limits.call_s, how=self._head.how_ended
            )
        except Exception as error:
            self._stop_start()
            raise EngineError(f"Ray did not start on this machine: {first_line(error)}") from error
        except BaseException:
            self._stop_start()
            raise

    @contextlib.contextmanager
    def _bounded(self, deadline: float) -> Iterator[None]:
        """Bound what waits within Ray, for longer than Ray lets one set."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        if not termination.end(f"hybridflow: {_too_long(self._limits.ray_start_s)}"):
            self._kill()  # in a program of the user's: without its servers `ray.init` raises

    def _stop_start(self) -> None:
        # Ray's end would wait in C++ for what stands still, and keep this process's threads from running meanwhile.
        self._kill()
        self.stop()

    def _kill(self) -> None:
        watchdog.kill_run(f"{_MARKER}={self._directory}", self._directory)

    def _lost(self, line: str) -> None:
        """End the command; in a program that is not the command, whoever waits for a rank raises."""
        if termination.cause is None and termination.end(f"hybridflow: {line}"):
            self._tell_watchdog(watchdog.END)

    def _tell_watchdog(self, line: str) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed where the end was forced meanwhile
                self._watchdog.stdin.write(f"{line}\n".encode())
                self._watchdog.stdin.flush()

    def _end(self) -> None:
        """Have the watchdog end all that this Ray has started, and wait until it has. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.communicate(timeout=_STOP_LIMIT_S)


class _Head:
    """The program that holds Ray's servers.

    Args:
        where: for what it prints.
        settings: what `ray_head` reads.
    """

    def __init__(self, where: Path, **settings: Any) -> None:
        self._log = where / "head.log"
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C is not for Ray's servers.
            self._process = subprocess.Popen(
                [sys.executable, "-P", ray_head.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._inbox = b""
        self._ended: dict[int, dict[str, Any]] = {}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its log says why
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()

    def started(self, deadline: float) -> dict[str, Any]:
        """Its first answer. Raises EngineError if there is none before the deadline, or Ray did not start."""
        answer = self._next(deadline)
        if answer is None:
            lines = self._log.read_text(errors="replace").splitlines()
            raise EngineError(lines[-1] if lines else "its servers did not answer")
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def how_ended(self, _descriptor: int, pid: int) -> tuple[str, bool]:
        """How a server ended, and whether it may have been asked to."""
        deadline = time.monotonic() + _TOLD_S
        while pid not in self._ended and (answer := self._next(deadline)) is not None:
            self._ended[answer["pid"]] = answer
        told = self._ended.get(pid)
        if told is None:
            return "is gone", True
        if told["exited"]:
            return f"ended with exit code {told['status']}", True
        number = signal.Signals(told["status"])
        return f"was killed by {number.name}", number in (signal.SIGTERM, signal.SIGINT)

    def close(self) -> None:
        """Let it end, if it has not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_LIMIT_S)
        self._process.stdout.close()

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Its next line; None if it ended, or the deadline passed."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._inbox:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(descriptor, 4096)
            if not data:
                return None
            self._inbox += data
        line, _, self._inbox = self._inbox.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _too_long(limit_s: float) -> str:
    return f"Ray did not start on this machine within limits.ray_start_s={limit_s:g} s"
