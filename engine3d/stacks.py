"""Stacks of a process's threads, written on request.

A thread of its own writes them, which has Python's lock (GIL) meanwhile. faulthandler's signal handler does not have
it. In CPython 3.12 it may interrupt the begin of a frame, follow a pointer that is not set yet, and so end the process.
It is for a process that does not answer because a call of C keeps the lock: no frame begins meanwhile.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""A process of a run that gets this signal writes the stacks of all its threads, at some risk to itself."""
STACKS_VARIABLE = "ENGINE3D_STACKS"
"""Environment variable with the file for stacks; stderr without it."""
STACKS = ".stacks"
"""Suffix of such files, which are next to logs."""

_CREDENTIALS = struct.Struct("3i")  # process, user and group, as in struct ucred
_TURN_S = 0.5
"""Wait for other processes of the same file, which would write in between."""


def stacks_path(log_path: Path) -> Path:
    """File for the stacks of the processes that write a log: next to it, so that the log's last lines stay."""
    return log_path.with_suffix(STACKS)


def write_stacks_on_request() -> None:
    """Make this process and its forks write stacks on request, whatever their main threads do."""
    path = os.environ.get(STACKS_VARIABLE)
    # Open as long as the process is: faulthandler writes where it can no longer open anything.
    file = 2 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    _listener.begin(file)


def request_stacks(pids: Sequence[int], limit_s: float) -> list[int]:
    """Request stacks of processes of this machine.

    Args:
        pids: their numbers.
        limit_s: for their answers.

    Returns:
        processes that listen and have not answered.
    """
    listening, answered = set[int](), set[int]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        requests.bind("")  # an address that nobody else has
        for pid in pids:
            try:
                requests.sendto(b"stacks", socket.MSG_DONTWAIT, _address(pid))
            except BlockingIOError:  # it has not read an earlier request
                pass
            except OSError:  # nobody listens there
                continue
            listening.add(pid)
        end = time.monotonic() + limit_s
        while listening - answered and (left_s := end - time.monotonic()) > 0:
            requests.settimeout(left_s)
            with contextlib.suppress(TimeoutError, ValueError):
                answered.add(int(requests.recv(32)))
    return [pid for pid in pids if pid in listening - answered]


def _address(pid: int) -> bytes:
    # Not of the file system, and so gone with the process. Containers may share it, and not their numbers.
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return b"\0engine3d-stacks-%d-%d" % (namespace, pid)


class _Listener:
    """The thread of this process that writes its stacks."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._file = 2

    def begin(self, file: int) -> None:
        """Write to a file descriptor from now on."""
        self._file = file
        if self._socket is None:
            os.register_at_fork(after_in_child=self._listen)
            self._listen()

    def _listen(self) -> None:
        if self._socket is not None:  # of the process that this one was forked from
            self._socket.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(OSError):  # somebody has this address: there is the signal
            self._socket.bind(_address(os.getpid()))
            threading.Thread(target=self._answer, args=[self._socket], name="stacks", daemon=True).start()

    def _answer(self, listening: socket.socket) -> None:
        while True:
            _, about, _, asking = listening.recvmsg(32, socket.CMSG_SPACE(_CREDENTIALS.size))
            if not any(_may_request(*header) for header in about):
                continue
            with contextlib.suppress(OSError):  # a disk that is full, or nobody waits any more
                self._write()
                listening.sendto(b"%d" % os.getpid(), asking)

    def _write(self) -> None:
        end = time.monotonic() + _TURN_S
        while time.monotonic() < end:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no fork has it too
                break
            except (BlockingIOError, PermissionError):  # of another process, by POSIX either of these
                time.sleep(0.01)
            except OSError:  # no file, such as a terminal
                break
        try:
            when, name = time.strftime("%Y-%m-%d %H:%M:%S"), Path("/proc/self/comm").read_text().strip()
            os.write(self._file, f"--- {when} process {os.getpid()} ({name})\n".encode())
            faulthandler.dump_traceback(self._file, all_threads=True)
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def _may_request(level: int, kind: int, data: bytes) -> bool:
    """True if the kernel's credentials of a message are those of this user, or of root."""
    if (level, kind) != (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) or len(data) < _CREDENTIALS.size:
        return False
    return _CREDENTIALS.unpack_from(data)[1] in (os.getuid(), 0)


_listener = _Listener()
