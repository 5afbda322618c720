"""One program of a sandbox as a process: its start, output, limits and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hybridflow.sandbox.program import ProgramLimits, SandboxError, SandboxResult, Verdict
from hybridflow.sandbox.usage import (
    ProgramUsage,
    children,
    descendants,
    killed_for_memory,
    shared_memory_bytes,
    usage_of,
)

_START_S = 120.0
_END_S = 20.0
_FIRST_LOOK_S, _LOOK_S = 0.02, 0.05
_PATIENCE, _LEAST_PATIENCE_S = 10.0, 120.0
"""Time after which a program has no verdict that was given no core for most of it: as a multiple of its limit, and the
least, in seconds."""
_BLOCK = 1 << 16
_LAST_WORDS = {
    Verdict.MEMORY: (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc"),
    Verdict.PROCESSES: (b"Resource temporarily unavailable", b"can't start new thread", b"Cannot fork"),
}
"""Ends of the last line on standard error of programs that ended because the kernel refused memory or a process."""


@dataclass
class _ProgramTime:
    """Time that a program has computed or waited for something else than a core, in seconds.

    An interval between two looks is one of waiting if no thread is ready at its end. Else it counts as much as was
    computed in it. One in which a process has begun counts in full: the time of processes that end unseen is unknown.
    """

    seconds: float = 0.0
    _elapsed_s: float = 0.0
    _computed_s: float = 0.0
    _pids: Collection[int] = ()

    def add(self, usage: ProgramUsage, pids: Collection[int], elapsed_s: float) -> None:
        """Count the interval from the previous look to one `elapsed_s` after the start, of processes with these ids."""
        computed_s = max(usage.computed_s - self._computed_s, 0.0)
        has_begun = bool(self._pids) and not set(pids) <= set(self._pids)
        waited_s = 0.0 if usage.ready and not has_begun else elapsed_s - self._elapsed_s
        self.seconds += max(computed_s, waited_s)
        self._elapsed_s, self._computed_s, self._pids = elapsed_s, usage.computed_s, pids

    def until(self, elapsed_s: float) -> float:
        """The time of a program that has ended `elapsed_s` after its start, less than a look after the last one."""
        return self.seconds + min(elapsed_s - self._elapsed_s, _LOOK_S)


class ProgramProcess:
    """A program from its start to its end. Made once for each program, in the thread of the event loop.

    Args:
        command: that confines it, and then writes a line to its standard input.
        limits: of the program.
        descriptors: that the command inherits.
        namespace: true if the program is in a process namespace, whose first process is the command's child.
    """

    def __init__(
        self, command: Sequence[str], limits: ProgramLimits, descriptors: Sequence[int], *, namespace: bool = True
    ) -> None:
        self._command, self._limits, self._descriptors, self._namespace = command, limits, descriptors, namespace
        self._ended = asyncio.Event()
        self._verdict: Verdict | None = None
        self._started: float | None = None
        self._spent = _ProgramTime()
        self._output: dict[int, bytearray] = {}
        self._most_output = int(limits.output_mb * 1e6)
        self._open: set[int] = set()

    async def run(self, environment: dict[str, str], directory: str) -> SandboxResult:
        """Start the program, wait for its end, and leave nothing of it.

        Raises:
            SandboxError: it could not be started, or ended without a verdict.
        """
        killed_before = killed_for_memory()
        process, (ready, stdout, stderr) = self._spawn(environment, directory)
        loop = asyncio.get_running_loop()
        end = os.pidfd_open(process.pid)
        loop.add_reader(end, self._ended.set)
        for descriptor in (ready, stdout, stderr):
            self._watch(descriptor, ready=descriptor == ready)
        try:
            await self._look(process.pid)
            await self._finish(process)
        finally:
            if process.returncode is None:
                self._kill(process.pid)
                process.wait()
            loop.remove_reader(end)
            os.close(end)
            for descriptor in (ready, stdout, stderr):
                loop.remove_reader(descriptor)
                os.close(descriptor)
        out, err = bytes(self._output[stdout]), bytes(self._output[stderr])
        return self._result(process.returncode, out, err, killed_before)

    def _spawn(self, environment: dict[str, str], directory: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        """Start the command. Returns its process, and the ends to read from its three standard streams."""
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
            try:
                read_ends, write_ends = [], []
                for _ in range(3):
                    read_end, write_end = os.pipe()
                    on_error.callback(os.close, read_end)
                    always.callback(os.close, write_end)
                    read_ends.append(read_end)
                    write_ends.append(write_end)
                process = subprocess.Popen(
                    self._command,
                    stdin=write_ends[0],
                    stdout=write_ends[1],
                    stderr=write_ends[2],
                    pass_fds=self._descriptors,
                    env=environment,
                    cwd=directory,
                    process_group=0,  # so that no interrupt of the terminal reaches it
                )
            except OSError as error:
                raise SandboxError(f"sandbox: no program could be started: {error.strerror}") from None
            on_error.pop_all()
        return process, read_ends

    def _watch(self, descriptor: int, *, ready: bool) -> None:
        os.set_blocking(descriptor, False)
        self._output[descriptor] = bytearray()
        self._open.add(descriptor)
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                block = os.read(descriptor, _BLOCK)
            except BlockingIOError:
                return
            if ready and block:
                self._started = self._started or time.monotonic()
            if not block:
                loop.remove_reader(descriptor)
                self._open.discard(descriptor)
            kept = self._output[descriptor]
            kept += block[: self._most_output - len(kept)]
            if len(kept) == self._most_output and len(block) > 0 and not ready:
                self._end_with(Verdict.OUTPUT)

        loop.add_reader(descriptor, read)

    def _end_with(self, verdict: Verdict) -> None:
        self._verdict = self._verdict or verdict
        self._ended.set()

    async def _look(self, pid: int) -> None:
        """Look at the processes until they have ended, or until a limit is reached.

        Raises:
            SandboxError: the machine is too busy.
        """
        began, wait_s = time.monotonic(), _FIRST_LOOK_S
        while not await self._ended_within(wait_s):
            wait_s = min(2 * wait_s, _LOOK_S)
            if self._started is None:
                if time.monotonic() - began > _START_S:
                    raise SandboxError(f"sandbox: a program was not set up within {_START_S:g} s")
                continue
            verdict = self._reached(self._processes(pid), time.monotonic() - self._started)
            if verdict is not None:
                self._end_with(verdict)

    async def _ended_within(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), wait_s)
        return self._ended.is_set()

    def _processes(self, pid: int) -> list[int]:
        """Processes of the program, without those of its confinement."""
        if not self._namespace:
            return [pid, *descendants(pid)]
        return [process for first in children(pid) for process in descendants(first)]

    def _reached(self, pids: list[int], elapsed_s: float) -> Verdict | None:
        """The limit that processes have reached, if any.

        Raises:
            SandboxError: the machine is too busy.
        """
        limits, usage = self._limits, usage_of(pids)
        most_bytes = limits.memory_mb * 1e6
        if usage.memory_bytes > most_bytes and (len(pids) == 1 or shared_memory_bytes(pids) > most_bytes):
            return Verdict.MEMORY
        if usage.processes >= limits.processes > 1:
            return Verdict.PROCESSES
        self._spent.add(usage, pids, elapsed_s)
        if self._spent.seconds >= limits.timeout_s:
            return Verdict.TIMEOUT
        if elapsed_s > max(_PATIENCE * limits.timeout_s, _LEAST_PATIENCE_S):
            raise SandboxError(
                f"sandbox: the machine is too busy: a program ran for {usage.computed_s:.1f} of {elapsed_s:.1f} s"
            )
        return None

    async def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until no process is left, and read what they have written."""
        if self._verdict is not None:
            self._kill(process.pid)
        deadline = time.monotonic() + _END_S
        while process.poll() is None or self._open:
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox: a program did not end within {_END_S:g} s of being killed")
            await asyncio.sleep(0.001)

    def _kill(self, pid: int) -> None:
        """Kill all processes. The first of a namespace takes all others with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # so that it starts no other meanwhile
            for other in children(pid) if self._namespace else descendants(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            (os.kill if self._namespace else os.killpg)(pid, signal.SIGKILL)

    def _result(self, returncode: int, stdout: bytes, stderr: bytes, killed_before: int) -> SandboxResult:
        if self._started is None:
            last = stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {returncode}"]
            raise SandboxError(f"sandbox: a program could not be set up: {last[0]}")
        seconds = self._spent.until(time.monotonic() - self._started)
        if self._verdict is not None:
            return SandboxResult(self._verdict, None, stdout, stderr, seconds)
        code = 128 - returncode if returncode < 0 else returncode
        if code == 128 + signal.SIGKILL and killed_for_memory() > killed_before:
            raise SandboxError("sandbox: the machine had no memory left, and a program was killed")
        verdict = Verdict.FAILED if code else Verdict.EXITED
        if code:
            last_line = stderr.rstrip().rpartition(b"\n")[2]
            verdict = next(
                (kind for kind, words in _LAST_WORDS.items() if any(word in last_line for word in words)), verdict
            )
        return SandboxResult(verdict, code, stdout, stderr, seconds)
