"""A run as its files show it to somebody who watches, on any host that sees its directory."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from engine3d.input_files import FileError, open_regular
from engine3d.json_records import EpochSeconds, read_record
from hybridflow.rundir.file_names import LOGS, PHASE, RECIPE
from hybridflow.rundir.status.lock import LOCK
from hybridflow.rundir.status.progress import Phase

ENGINES = "sglang"
TEACHER_ENGINES = "sglang-teacher"
JUDGE_SERVERS = "sglang-judge"
"""Part of the names of engines' logs. Engines belong to the role `rollout`."""
_LOG = re.compile(r"(?P<role>.+)-(?P<rank>\d{1,6})\.log")
_BLOCK = 1 << 16
_MOST_BYTES = 1 << 24
"""Largest size of a file's last lines. A line may be the output of a program."""
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class RunPosition:
    """Current step and phase of a run.

    Args:
        step: 0 before the first.
        phase: that it has entered.
        since: when, in seconds since the epoch.
    """

    step: int
    phase: Phase
    since: EpochSeconds


@dataclass(frozen=True)
class Log:
    """The output of a process.

    Args:
        path: of the file.
        role: of the process; `sglang` for an engine.
        rank: within the role.
    """

    path: Path
    role: str
    rank: int

    @property
    def name(self) -> str:
        """Such as `actor-0`."""
        return f"{self.role}-{self.rank}"

    @property
    def of_rank(self) -> tuple[str, int]:
        """Role and rank that it belongs to: an engine is a rollout rank's."""
        return "rollout" if self.role == ENGINES else self.role, self.rank

    @property
    def path_of_rank(self) -> Path:
        """The log of that rank."""
        role, rank = self.of_rank
        return self.path.with_name(f"{role}-{rank}.log")

    def is_of(self, role: str) -> bool:
        """True if the log is a role's. Engines belong to `rollout` too."""
        return role == self.role or (role == "rollout" and self.role == ENGINES)


def checked_run(directory: Path) -> Path:
    """A run's directory.

    Raises:
        UserError: it is none.
    """
    try:
        if not directory.is_dir():
            raise UserError(f"no such directory: {directory}; expected that of a run, such as runs/demo")
        if not (directory / RECIPE).exists():
            raise UserError(f"no {RECIPE} in {directory}; expected the directory of a run, such as runs/demo")
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}") from None
    return directory


def goes_on(directory: Path) -> bool:
    """True if a process holds the run's directory, on this host or on one that shares its disk and its locks.

    Raises:
        UserError: its lock cannot be read.
    """
    try:
        descriptor = open_regular(directory / LOCK)
    except FileError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_position(directory: Path) -> RunPosition | None:
    """Read the current step and phase of the run, or its last ones; None before it has recorded any.

    Raises:
        UserError: the file is damaged.
    """
    return read_record(directory / PHASE, RunPosition)


def find_logs(directory: Path) -> list[Log]:
    """The output of every process of the run that has written some, by role and rank.

    Raises:
        UserError: they cannot be listed.
    """
    try:
        paths = list((directory / LOGS).iterdir()) if (directory / LOGS).is_dir() else []
    except OSError as error:
        raise UserError(f"{directory / LOGS} cannot be read: {error.strerror}") from None
    matches = [(path, _LOG.fullmatch(path.name)) for path in paths]
    logs = [Log(path, match["role"], int(match["rank"])) for path, match in matches if match]
    return sorted(logs, key=lambda log: (log.role, log.rank))


def last_lines(path: Path, count: int) -> list[bytes]:
    """The last lines of a file, the oldest first, without their ends; also one that is not finished.

    Raises:
        UserError: it cannot be read.
    """
    descriptor = open_regular(path)
    try:
        return _last_lines(descriptor, os.fstat(descriptor).st_size, count)
    finally:
        os.close(descriptor)


def _last_lines(descriptor: int, end: int, count: int) -> list[bytes]:
    """Return the last lines before an offset."""
    text, begin = b"", end
    while begin > 0 and end - begin < _MOST_BYTES and text.rstrip(b"\n").count(b"\n") < count:
        block = os.pread(descriptor, min(_BLOCK, begin), begin - min(_BLOCK, begin))
        begin -= min(_BLOCK, begin)
        text = block + text
    lines = text.removesuffix(b"\n").split(b"\n") if text else []  # progress bars have carriage returns
    return lines[-count:] if count else []


def follow(directory: Path, is_wanted: Callable[[Log], bool], count: int) -> Iterator[tuple[Log, bytes]]:
    """The last lines of logs, and what is added to them, until the run has ended.

    Args:
        directory: of the run.
        is_wanted: of a log, whether it is followed; one that comes later is followed from its beginning.
        count: last lines of each that is there.

    Raises:
        UserError: one of them cannot be read.
    """
    read: dict[Path, tuple[int, bytes]] = {}
    first = {log.path for log in find_logs(directory)}
    while True:
        is_going_on = goes_on(directory)  # before the look, so that none of its lines is missed
        logs = [log for log in find_logs(directory) if is_wanted(log)]
        for log in logs:
            yield from ((log, line) for line in _added(log.path, read, count if log.path in first else None))
        if not is_going_on:
            yield from ((log, left) for log in logs if (left := read[log.path][1]))
            return
        time.sleep(_LOOK_EVERY_S)


def _added(path: Path, read: dict[Path, tuple[int, bytes]], count: int | None) -> list[bytes]:
    """Whole lines that a file has got since the last look; at the first one its last `count`, or all if None."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if path not in read and count is not None:
            lines = _last_lines(descriptor, size, count)
            is_whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
            read[path] = size, b"" if is_whole or not lines else lines.pop()
            return lines
        offset, left = read.get(path, (0, b""))
        if size < offset:  # another run's, in its place
            offset, left = 0, b""
        os.lseek(descriptor, offset, os.SEEK_SET)
        while block := os.read(descriptor, _BLOCK):
            offset, left = offset + len(block), left + block
        *lines, left = left.split(b"\n")
        read[path] = offset, left
        return lines
    finally:
        os.close(descriptor)
