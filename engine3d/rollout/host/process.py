"""The client's side of an engine's host process: its start, its calls, its responses, and its death."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine3d.errors import LOST_RANKS, EngineError, UserError
from engine3d.progress import progress
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.host.log import describe_death, lost_neighbour
from engine3d.rollout.host.messages import (
    START_ID,
    EndedResponses,
    HostCall,
    Launch,
    Limits,
    Progress,
    Reply,
)
from engine3d.rollout.requests import EngineStats, Response
from engine3d.run_files import RUN_DIRECTORY_VARIABLE, make_run_directory, remove_run_files
from engine3d.stacks import STACKS_VARIABLE, stacks_path

_EXIT_GRACE_S = 5.0  # between the end of the connection and the end of the process
_SEND_TIMEOUT_S = 60  # the host reads at once, unless it hangs


def run_environment(run_directory: Path, log_path: Path) -> dict[str, str]:
    """Variables by which the processes have their client's code, the files of their run, and a place for stacks.

    Args:
        run_directory: that `make_run_directory` has made for them.
        log_path: of what they print.
    """
    return {
        # The client's code, in the process and in all that it starts; not what lies in the working directory.
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "PYTHONSAFEPATH": "1",
        "TMPDIR": str(run_directory),
        RUN_DIRECTORY_VARIABLE: str(run_directory),
        STACKS_VARIABLE: str(stacks_path(log_path.absolute())),
    }


class PendingResponses:
    """Filled by the thread that reads what the engine sends, emptied by those that take.

    Args:
        log_path: of the engine, for errors.
    """

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._ended: dict[int, Response] = {}
        self._error: str | None = None
        self._further_at = time.monotonic()
        self._done = 0
        """Complete responses among those that were last submitted together."""
        self.stats: EngineStats | None = None
        """The latest that the engine has reported."""

    def submitted(self, samples: Iterable[int]) -> None:
        """These are in flight from here on. Raises UserError, and adds none, if one is or was not taken yet."""
        with self._changed:
            if not self._in_flight:
                self._further_at = time.monotonic()
            new = set[int]()
            for sample in samples:
                if sample in self._in_flight or sample in self._ended or sample in new:
                    raise UserError(f"sample {sample} is in flight already")
                new.add(sample)
            self._in_flight |= new

    def forget(self, samples: Collection[int]) -> None:
        """Nobody takes these any more."""
        with self._changed:
            self._in_flight.difference_update(samples)
            for sample in samples:
                self._ended.pop(sample, None)

    def check_known(self, samples: Collection[int]) -> None:
        """Raise EngineError for a sample that is neither in flight nor waits to be taken."""
        with self._changed:
            for sample in samples:
                if sample not in self._in_flight and sample not in self._ended:
                    raise EngineError(f"sample {sample} is not in flight: it was not submitted, or was taken already")

    def add(self, responses: dict[int, Response]) -> None:
        """These have ended."""
        with self._changed:
            self._further_at = time.monotonic()
            self._ended |= {sample: response for sample, response in responses.items() if sample in self._in_flight}
            self._in_flight.difference_update(responses)
            self._changed.notify_all()

    def came_further(self, done: int) -> None:
        """The engine has run batches. `done`: complete responses of those that were last submitted together."""
        self._further_at, self._done = time.monotonic(), done

    def resume(self) -> None:
        """Measure a stall from now: until now the engine stood still for its weights."""
        self._further_at = time.monotonic()

    def fail(self, error: str) -> None:
        """No response ends any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, timeout_s: float, stalled_s: float, samples: Collection[int] | None) -> dict[int, Response]:
        """Responses that have ended since the last call, by sample. Waits up to `timeout_s` for one.

        Args:
            timeout_s: limit of the wait.
            stalled_s: limit of the time without progress of the engine while responses are in flight.
            samples: take no others; all if None.

        Raises:
            EngineError: nothing ends any more, or the engine is stalled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._has_ended(samples), timeout_s)
            if samples is None:
                ended, self._ended = self._ended, {}
            else:
                ended = {sample: self._ended.pop(sample) for sample in list(self._ended) if sample in samples}
            if ended:
                return ended
            if self._error is not None:
                raise EngineError(self._error)
            in_flight = sum(samples is None or sample in samples for sample in self._in_flight)
            if in_flight and time.monotonic() > self._further_at + stalled_s:
                raise EngineError(self._stalled(in_flight, stalled_s))
            return {}

    def _has_ended(self, samples: Collection[int] | None) -> bool:
        return bool(self._ended) if samples is None else any(sample in samples for sample in self._ended)

    def _stalled(self, in_flight: int, stalled_s: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() + self._further_at - time.monotonic()))
        return (
            f"rollout engine: responses came no further within {stalled_s:g} s: no token since {since}, "
            f"{self._done} of {in_flight} responses are done; log: {self._log_path}"
        )


class HostProcess:
    """One host process and everything that it started, in a session of its own."""

    def __init__(self, server_arguments: dict[str, Any], environment: dict[str, str], log_path: Path) -> None:
        """Start the process. `wait_until_up` waits for its engine."""
        self.log_path = log_path
        self._run_directory, self._run_lock = make_run_directory()
        self._several_hosts = server_arguments.get("nnodes", 1) > 1
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine3d.rollout.host.program", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment | run_environment(self._run_directory, log_path),
            )
        self._connection = Connection(ours.detach())
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._ids = itertools.count(START_ID + 1)
        self._up: Future[Any] = Future()
        self._pending: dict[int, tuple[str, Future[Any]]] = {START_ID: ("start", self._up)}
        self._progress = Progress({})
        self._counted = START_ID
        self._progress_at = time.monotonic()
        self.responses = PendingResponses(log_path)
        """Responses in flight, and those that have ended."""
        self._death: str | None = None
        self._ending = False
        self._reader = threading.Thread(target=self._read, name="rollout host", daemon=True)
        self._reader.start()
        self._send(Launch(server_arguments, self._run_directory, os.getpid()))

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def pid(self) -> int:
        """The host's process id, which is also the id of its process group."""
        return self._process.pid

    def wait_until_up(self, timeout_s: float) -> Limits | None:
        """Wait for the engine. Raises EngineError when it does not come up, and leaves nothing behind.

        Returns:
            What it accepts; None of a part that takes no requests.
        """
        try:
            limits: Limits | None = self._wait(self._up, "start", timeout_s)
        except BaseException:
            self.kill()
            raise
        return limits

    def check(self, phase: str) -> None:
        """Raise EngineError if the process has died."""
        if self._death is not None:
            raise EngineError(f"rollout engine died during {phase}: {self._death}")

    def call(self, phase: str, method: str, timeout_s: float, *, responses: int | None = None, **arguments: Any) -> Any:
        """Call a method of the host and wait for its result.

        Args:
            phase: names the call in errors.
            method: of the host.
            timeout_s: limit of the call; of one with `responses`, of the time without progress.
            responses: how many of them the call computes or begins; 0 if it waits for those of other calls.

        Raises:
            EngineError: the call failed or was not done in time, or the engine died.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._death is not None:
                raise EngineError(f"rollout engine is not running: {self._death}")
            id = next(self._ids)
            self._pending[id] = (phase, future)
        self._send(HostCall(id, method, arguments))
        try:
            if responses is None:
                return self._wait(future, phase, timeout_s)
            return self._wait_while_progressing(future, phase, timeout_s, id, responses)
        finally:
            if not future.done():  # the time is over, or the caller was interrupted
                self.notify("cancel", call_id=id)

    def notify(self, method: str, **arguments: Any) -> None:
        """Call a method of the host whose result nobody waits for."""
        self._send(HostCall(next(self._ids), method, arguments))

    def shutdown(self, timeout_s: float) -> None:
        """End the engine in order, or by force when that takes longer than `timeout_s`."""
        self._ending = True
        with contextlib.suppress(EngineError):  # what is left after an engine that does not answer, `kill` takes
            self.call("shutdown", "shutdown", timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the host and all of its group, and take its temporary files away. Idempotent."""
        self._ending = True
        if self.is_alive:
            self._kill_group()
            self._reader.join(2 * _EXIT_GRACE_S)

    def _send(self, message: Launch | HostCall) -> None:
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            # Dead, or so stuck that it reads no more: the reader sees the end, and says why to all who wait.
            if self.is_alive:
                self._kill_group()

    def _wait(self, future: Future[Any], phase: str, timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            message = f"rollout engine: {phase} was not done within {timeout_s:g} s; log: {self.log_path}"
            raise EngineError(message) from None

    def _wait_while_progressing(
        self, future: Future[Any], phase: str, timeout_s: float, id: int, responses: int
    ) -> Any:
        began = time.monotonic()
        if responses:
            self._counted = id
            progress.count("responses", responses)
        while (left := max(began, self._progress_at) + timeout_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                return future.result(left)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() + left - timeout_s))
        done = self._progress.done.get(id, 0)
        far = f", {done} of {responses} responses are done" if responses else ""
        raise EngineError(
            f"rollout engine: {phase} came no further within {timeout_s:g} s: no token since {since}{far}; "
            f"log: {self.log_path}"
        )

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Progress):
                    self._progress, self._progress_at = message, time.monotonic()
                    progress.batch_done()
                    progress.done = message.done.get(self._counted, progress.done)
                    self.responses.stats = message.stats or self.responses.stats
                    self.responses.came_further(message.done.get(self._counted, 0))
                elif isinstance(message, EndedResponses):
                    self.responses.stats = message.stats
                    self.responses.add(message.responses)
                else:
                    self._resolve(message)
        except (EOFError, OSError):
            self._bury()

    def _resolve(self, reply: Reply) -> None:
        with self._lock:
            if reply.id not in self._pending:
                return  # of a call that was cancelled, or that nobody waits for
            phase, future = self._pending.pop(reply.id)
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(EngineError(f"rollout engine: {phase} failed: {reply.error}; log: {self.log_path}"))

    def _bury(self) -> None:
        """The connection ended: reap the host, kill what is left of its group, and fail every waiting call."""
        self._await_exit()
        # Before the host is reaped, so that the id of its process group is still its own.
        self._kill_group()
        exit_code = self._process.wait()
        remove_run_files(self._run_directory)
        self._run_lock.close()
        if self._ending:
            death = "it was shut down"
        else:
            if lost := self._several_hosts and lost_neighbour(self.log_path):
                death = f"{LOST_RANKS}: {lost}; log: {self.log_path}"
            else:
                death = describe_death(exit_code, self.log_path)
        with self._lock:
            self._death = death
            waiting, self._pending = self._pending, {}
        for phase, future in waiting.values():
            future.set_exception(EngineError(f"rollout engine died during {phase}: {death}"))
        self.responses.fail(f"rollout engine died during generation: {death}")
        with self._send_lock:
            self._connection.close()

    def _await_exit(self) -> None:
        """Wait for the host to end by itself, so that its exit code says how, but not for long."""
        end = time.monotonic() + _EXIT_GRACE_S
        while time.monotonic() < end:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
            time.sleep(0.01)


class HostOwner(ABC):
    """A client of an engine, or of its part on one host.

    Args:
        config: of the engine.
        log_path: where all that its processes print goes; a temporary file, kept when they die, if None.
    """

    def __init__(self, config: RolloutConfig, log_path: str | Path | None) -> None:
        self.config = config
        self._log_path = Path(log_path) if log_path is not None else None
        self._host: HostProcess | None = None

    @abstractmethod
    def start(self) -> Self:
        """Start it and wait until it is up. Raises EngineError after `start_timeout_s` at the latest."""

    def is_alive(self) -> bool:
        """True if its process runs, even while it is busy or stuck."""
        return self._host is not None and self._host.is_alive

    def shutdown(self) -> None:
        """End it and everything that it started; by force after `shutdown_timeout_s`. Idempotent."""
        if self._host is None or not self._host.is_alive:
            return
        self._host.shutdown(self.config.shutdown_timeout_s)
        if self._log_path is None:
            self._host.log_path.unlink(missing_ok=True)  # nothing went wrong that it could tell of

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _running(self) -> HostProcess:
        if self._host is None:
            raise EngineError("rollout engine was not started")
        return self._host
