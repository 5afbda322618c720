"""The process of one rank: a Ray actor that holds a role's worker and answers for it, and its heartbeat.

Importing this module brings in neither torch nor an engine: the rank's environment is set before either is loaded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.out_of_memory import in_short
from engine3d.progress import progress
from engine3d.rendezvous import STORE_VARIABLE, listen, serve
from engine3d.stacks import STACKS_VARIABLE, stacks_path, write_stacks_on_request
from engine3d.startup.imports import quick_imports
from hybridflow.errors.rank_failure import Failure
from hybridflow.metrics.timeline import TimelineSpan
from hybridflow.rundir.private import take_umask
from hybridflow.rundir.status.heartbeat import BEAT_S, Heartbeat, HeartbeatFile, heartbeat_path
from hybridflow.workers.context import RankAnswer, WorkerContext
from hybridflow.workers.watching.flight_recorder import FlightRecorder

if TYPE_CHECKING:  # the rank's environment is set before torch is loaded
    from torch.distributed import TCPStore

_START = "start"
"""Method of a rank until its worker is built."""
CONCURRENT = "concurrent"
"""Ray's concurrency group of calls that run concurrently with the group's."""


class RankProcess:
    """Made a Ray actor by `WorkerGroup`: one a rank."""

    def __init__(self, role: str, rank: int, environment: Mapping[str, str], log_path: Path | None) -> None:
        self._role, self._rank = role, rank
        self._worker: Any = None
        self._store: TCPStore | None = None  # on rank 0
        os.environ.update(environment)
        take_umask(os.environ)
        self._importing = contextlib.ExitStack()
        self._importing.enter_context(quick_imports())
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ[STACKS_VARIABLE] = str(stacks_path(log_path.absolute()))
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(file=2)
        write_stacks_on_request()
        self._pulse = _Pulse(role, rank, log_path)
        self._closing = False

    def identify(self, listens: bool) -> tuple[int, str, str, int]:
        """Return process id, id and address of the node, and the port of the store at which the ranks meet, if it is
        here.

        Args:
            listens: whether the store is to be here.
        """
        import ray
        import ray.util

        address = ray.util.get_node_ip_address()
        if listens:
            self._store = serve(listen(address))
        port = self._store.port if self._store is not None else 0
        return os.getpid(), ray.get_runtime_context().get_node_id(), address, port

    def construct(
        self, factory: Callable[..., Any], context: WorkerContext, arguments: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Failure | None:
        """Build the worker from positional and keyword arguments."""
        os.environ[STORE_VARIABLE] = context.store
        args, kwargs = arguments
        context = replace(context, at_work=self._pulse.at)

        def build() -> None:
            self._worker = factory(context, *args, **kwargs)

        failure, _ = self._run(_START, build)
        self._importing.close()
        return failure

    def call(
        self, method: str, keep: bool, earlier: Sequence[Any], /, *args: Any, **kwargs: Any
    ) -> tuple[RankAnswer | Failure, Any]:
        """Run a method of the worker.

        An argument that is itself a failure, of the call that was to make it, is passed on as this call's.

        Args:
            keep: whether anybody wants the result.
            earlier: statuses of calls that compute on this rank's devices before it, well or not.

        Returns:
            An answer or a failure; and the result as it is kept, None where nobody wants it, or the failure.
        """

        def run() -> tuple[RankAnswer | Failure, Any]:
            positional = [_unpacked(value) for value in args]
            keyword = {name: _unpacked(value) for name, value in kwargs.items()}
            for value in (*positional, *keyword.values()):
                if isinstance(value, Failure):
                    return value, value
            if earlier:
                with self._pulse.waiting_for_turn():
                    _wait_for_turn(earlier)
            begin = time.time()
            result = getattr(self._worker, method)(*positional, **keyword)
            summary, kept = _packed(result, positional) if keep else (None, None)
            return RankAnswer(TimelineSpan(self._role, self._rank, method, begin, time.time()), summary), kept

        failure, answer = self._run(method, run)
        return answer if failure is None else (failure, failure)

    def call_concurrently(self, method: str, results: int, /, *args: Any) -> Any:
        """Run a method of the worker concurrently with its calls, in its own thread, for a holder of the handle.

        Args:
            method: of the worker.
            results: how many it returns, as a tuple if more than one.
            args: of it.

        Returns:
            Its results, batches packed; a failure in place of the first where there was one.
        """
        try:
            result = getattr(self._worker, method)(*map(_unpacked, args))
        except Exception as error:
            stack = traceback.format_exc()
            if not self._closing:  # what waits is failed then
                print(stack, file=sys.stderr, flush=True)
            line = " ".join(str(error).split()) or type(error).__name__
            failure = Failure(self._role, self._rank, method, line, isinstance(error, UserError), time.time(), stack)
            return failure if results == 1 else (failure, *[None] * (results - 1))
        return result

    def close(self) -> None:
        """Call the worker's `shutdown()`, if it has one, to end its own processes and files."""
        self._closing = True
        if hasattr(self._worker, "shutdown"):
            self._worker.shutdown()

    def _run(self, method: str, action: Callable[[], Any]) -> tuple[Failure | None, Any]:
        try:
            with self._pulse.at(method):
                return None, action()
        except BaseException as error:  # also SystemExit, which Ray would take for an orderly end of the actor
            stack = traceback.format_exc()
            print(stack, file=sys.stderr, flush=True)
            user_error = isinstance(error, UserError)
            message = " ".join(str(error).split())
            line = message if user_error else in_short(f"{type(error).__name__}: {message}".rstrip(": "))
            return Failure(self._role, self._rank, method, line, user_error, time.time(), stack), None


@dataclass(eq=False)
class _Call:
    """A call of a method.

    Args:
        method: empty if there is none.
        has_turn: False while it waits for the devices.
        since: time from which it computes, or waits for the devices.
    """

    method: str
    has_turn: bool = True
    since: float = field(default_factory=time.time)


class _Pulse:
    """The heartbeat of this process: a thread reports once a second the call that its main thread runs.

    Args:
        role, rank: whose process this is.
        log_path: of its log, next to which the file is; no heartbeat if None.
    """

    def __init__(self, role: str, rank: int, log_path: Path | None) -> None:
        self._role, self._rank, self._host = role, rank, socket.gethostname()
        self._calls: list[_Call] = []
        """Calls in progress: concurrent ones end in any order."""
        self._idle = _Call(_START)
        self._begun = 0
        """Calls that have begun."""
        self._usual_s: dict[str, float] = {}
        self._counting: set[str] = set()
        progress.begin()
        if log_path is not None:
            file, recorder = HeartbeatFile(heartbeat_path(log_path)), FlightRecorder(role, rank, log_path)
            file.write(self._beat())
            threading.Thread(target=self._keep_beating, args=(file, recorder), name="heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def at(self, method: str) -> Iterator[None]:
        """Mark the block as a call of a method."""
        progress.begin()
        call = _Call(method)
        self._calls.append(call)
        self._begun += 1
        try:
            yield
        finally:
            if progress.batches:
                self._counting.add(method)
            if method != _START:  # a worker's own comes after that of its process, and loads and compiles as well
                self._usual_s[method] = max(self._usual_s.get(method, 0.0), progress.longest_pause_s)
            self._idle = _Call("")
            self._calls.remove(call)

    @property
    def _call(self) -> _Call:
        """The call that began last of those in progress."""
        return next(reversed(self._calls), self._idle)

    @contextlib.contextmanager
    def waiting_for_turn(self) -> Iterator[None]:
        """Mark the block as a wait for the devices."""
        call = self._call
        call.has_turn = False
        try:
            yield
        finally:
            progress.begin()
            call.has_turn, call.since = True, time.time()

    def _keep_beating(self, file: HeartbeatFile, recorder: FlightRecorder) -> None:
        while True:
            time.sleep(BEAT_S)
            with contextlib.suppress(OSError):  # whatever needs a failing file system reports it
                file.write(self._beat())
                if recorder.is_requested():
                    recorder.write()
                    self._wait_for_next_call()  # without one, the last report is from when the run failed
                    recorder.forget_request()

    def _wait_for_next_call(self) -> None:
        begun = self._begun
        while self._begun == begun:
            time.sleep(BEAT_S)

    def _beat(self) -> Heartbeat:
        call, parts_done = self._call, progress.batches
        method = call.method
        if parts_done:
            self._counting.add(method)
        now = time.time()
        return Heartbeat(
            role=self._role,
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            method=method,
            has_turn=call.has_turn,
            since=call.since,
            completed=parts_done,
            progressed=now - (time.monotonic() - progress.at),
            usual_s=self._usual_s.get(method),
            counts=method in self._counting,
            at=now,
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
        )


def _wait_for_turn(earlier: Sequence[Any]) -> None:
    """Wait until every call has ended: a rank that failed or died has a status too."""
    import ray

    ray.wait(list(earlier), num_returns=len(earlier), fetch_local=False)


def _unpacked(value: Any) -> Any:
    if "torch" not in sys.modules:
        return value  # columns would have brought it in
    from hybridflow.batch.worker_output import unpack

    return unpack(value)


def _packed(result: Any, arguments: Sequence[Any]) -> tuple[Any, Any]:
    if "torch" not in sys.modules:
        return None, result
    from hybridflow.batch.worker_output import pack, send_tensors_as_arrays

    send_tensors_as_arrays()
    kept, summary = pack(result, arguments)
    return summary, kept
