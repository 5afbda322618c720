"""The stacks of a process's threads, for who asks for them.

A thread of its own writes them, which has Python's lock (GIL) meanwhile. faulthandler's handler of a signal does not
have it: in CPython 3.12 it may come while a frame begins, follow a pointer that is not set yet, and so end the process.
It is left for a process that does not answer since a call of C keeps the lock: no frame begins meanwhile.
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
"""Environment variable with the file that they go to; stderr without it."""
STACKS = ".stacks"
"""Of the names of such files, which are beside logs."""

_CREDENTIALS = struct.Struct("3i")  # process, user and group, as in struct ucred
_TURN_S = 0.5
"""For other processes of the same file, which would write in between."""


def stacks_path(log_path: Path) -> Path:
    """Where the stacks of the processes that write a log go: into a file beside it, so that its last lines stay."""
    return log_path.with_suffix(STACKS)


def write_stacks_when_asked() -> None:
    """Have this process and its forks do so, whatever their main threads are at."""
    path = os.environ.get(STACKS_VARIABLE)
    # Open as long as the process is: faulthandler writes where it can no longer open anything.
    file = 2 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    _listener.begin(file)


def ask_for_stacks(pids: Sequence[int], limit_s: float) -> list[int]:
    """Have processes of this machine write their stacks.

    Args:
        pids: their numbers.
        limit_s: for their answers.

    Returns:
        Those that listen and have not answered.
    """
    listening, answered = set[int](), set[int]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind("")  # an address that nobody else has
        for pid in pids:
            try:
                own.sendto(b"stacks", socket.MSG_DONTWAIT, _address(pid))
            except BlockingIOError:  # it has not read what it was asked before
                pass
            except OSError:  # nobody listens there
                continue
            listening.add(pid)
        end = time.monotonic() + limit_s
        while listening - answered and (left_s := end - time.monotonic()) > 0:
            own.settimeout(left_s)
            with contextlib.suppress(TimeoutError, ValueError):
                answered.add(int(own.recv(32)))
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
            if not any(_may_ask(*each) for each in about):
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


def _may_ask(level: int, kind: int, data: bytes) -> bool:
    """Whether what the kernel says of a message tells that it is from this user, or from root."""
    if (level, kind) != (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) or len(data) < _CREDENTIALS.size:
        return False
    return _CREDENTIALS.unpack_from(data)[1] in (os.getuid(), 0)


_listener = _Listener()
