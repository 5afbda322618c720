"""Supervisor of a user's reward function: starts its process, limits its resources, and ends all its descendants.

    python -I supervisor.py CONNECTION LIFELINE PARENT LIMITS

A script, with the standard library alone. It forks the worker (`function_process.py`), which serves calls over the
socket CONNECTION. When the parent closes the socket LIFELINE, on purpose or by dying, when the worker ends, or when
there are more processes than LIMITS allow, it kills whatever descends from it, whatever that is doing: what a process
leaves that ends becomes the supervisor's own, also a daemon in a session of its own. If it was the limit, LIFELINE says
so.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK_S = 0.5
_KILL_LIMIT_S = 8.0
_BLOCK = 1 << 16
_LONGEST_LINE = 1000
"""Bytes of each line where lines are counted."""
_PRINTED = bytes(byte if byte >= 0x20 or byte in b"\t\n\r" else ord("?") for byte in range(0x7F)) + b"?"
_PRINTED += bytes(range(0x80, 0x100))
"""Printable form of each byte of the output, so that no terminal interprets it."""


class _Supervisor:
    def __init__(self, worker: int, lifeline: int, parent: int, output: int, limits: dict[str, Any]) -> None:
        self._worker, self._lifeline, self._parent, self._output = worker, lifeline, parent, output
        self._most_processes, self._output_left = limits["processes"], int(limits["output_bytes"])
        self._lines_left, self._name = limits["output_lines"], limits["name"]
        if self._lines_left is not None:
            self._output_left = min(self._output_left, self._lines_left * _LONGEST_LINE)
        self._last_byte = b"\n"
        self._code: int | None = None

    def run(self) -> NoReturn:
        """Wait for the end of the worker or of the parent, kill what is left, and end as the worker did."""
        worker_end = os.pidfd_open(self._worker)
        looked, watched = 0.0, [self._lifeline, worker_end, self._output]
        # The look at the parent is for a lifeline that outlives it in a process that it forked.
        while os.getppid() == self._parent:
            ready, _, _ = select.select(watched, [], [], _TICK_S)
            if self._output in ready and not self._forward():
                watched.remove(self._output)  # the worker and its processes have closed it
            if self._lifeline in ready or worker_end in ready:
                break
            if time.monotonic() - looked > _TICK_S:
                looked = time.monotonic()
                if self._too_many():
                    break
                self._reap()
        self._kill_all()
        with contextlib.suppress(BlockingIOError):
            while self._output_left > 0 and self._forward():
                pass
        self._end()

    def _forward(self) -> bool:
        """Pass on what the worker and its processes have printed; beyond the limit it is read and dropped."""
        block = os.read(self._output, _BLOCK)
        if self._output_left > 0:
            self._print(block)
        return bool(block)

    def _print(self, block: bytes) -> None:
        kept = block[: self._output_left]
        if self._lines_left is not None:
            kept = b"".join(kept.splitlines(keepends=True)[: self._lines_left])
            self._lines_left -= kept.count(b"\n")
        self._output_left -= len(kept)
        if len(kept) < len(block):
            self._output_left = 0
        kept = kept.translate(_PRINTED)
        if not self._output_left:
            end = b"" if (kept or self._last_byte).endswith(b"\n") else b"\n"
            kept += end + f"[reward {self._name!r} has printed more, which is dropped]\n".encode(errors="replace")
        self._last_byte = kept[-1:] or self._last_byte
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(2, kept)

    def _too_many(self) -> bool:
        count = sum(1 for _ in _descendants(os.getpid()))
        if count <= self._most_processes:
            return False
        with contextlib.suppress(OSError):
            os.write(
                self._lifeline, f"had {count} processes where limits.processes is {self._most_processes:.0f}".encode()
            )
        return True

    def _kill_all(self) -> None:
        """Kill descendants until none is left: one may have started another meanwhile."""
        deadline = time.monotonic() + _KILL_LIMIT_S
        while time.monotonic() < deadline:
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not self._reap():
                return
            time.sleep(0.002)

    def _reap(self) -> bool:
        """Reap the children that have ended. Returns true if others are left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._worker:
                    self._code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return False
        return True

    def _end(self) -> NoReturn:
        if self._last_byte != b"\n":
            with contextlib.suppress(OSError):
                os.write(2, b"\n")
        code = -signal.SIGKILL if self._code is None else self._code
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _descendants(pid: int) -> Iterator[int]:
    """Descendants of a process, the nearest first."""
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        yield from children
        waiting += children


def _children(pid: int) -> list[int]:
    children = []
    with contextlib.suppress(OSError):  # gone meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += [int(child) for child in (thread / "children").read_text().split()]
    return children


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _limit(limits: dict[str, Any]) -> None:
    """Limit the resources of this process, and of each that it starts. Lower limits in force stay."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: int(limits["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
    }
    for kind, value in bounds.items():
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _child_module() -> ModuleType:
    path = Path(__file__).with_name("function_process.py")
    spec = importlib.util.spec_from_file_location("hybridflow_reward_child", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _main(connection: int, lifeline: int, parent: int, limits: dict[str, Any]) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    output, printed = os.pipe()
    worker = os.fork()
    if worker:
        os.close(connection)
        os.close(printed)
        os.set_blocking(output, False)
        _Supervisor(worker, lifeline, parent, output, limits).run()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.setpgid(0, 0)
    os.close(lifeline)
    os.close(output)
    for standard in (1, 2):
        os.dup2(printed, standard)
    os.close(printed)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a killed process loses no output
    _limit(limits)
    child = _child_module()
    try:
        child.serve(socket.socket(fileno=connection))
    except BrokenPipeError:  # the parent has closed the connection
        pass
    except OSError:  # of a descriptor that is none any more, perhaps with those of its output
        os._exit(child.LOST_CONNECTION)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
