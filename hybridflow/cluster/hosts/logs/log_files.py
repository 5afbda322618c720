"""What ranks write, as it goes to host 0 from one that shares no disk with it: names of files, and their new bytes.

Files are opened below the run's directory, and no link is followed there: nothing else of a host is sent, and nothing
else on host 0 is written.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.rundir.file_names import FLIGHT_RECORDER, LOGS

HEARTBEAT = ".heartbeat"
"""Of the names of files that are replaced; to all others is added."""
HEARTBEAT_BYTES = 1024
MOST_BYTES = 128 << 10
"""Of the pieces that are on their way from one host at a time."""
_PIECE_BYTES = 32 << 10
_KNOWN_BY = 64
_MOST_RECORDED = 64 << 20
"""Of a flight recording: one that is larger is not sent, as a part of it is of no use."""
_DIRECTORIES: Mapping[str, tuple[str, ...]] = {
    "logs": (LOGS,),
    "nccl": (FLIGHT_RECORDER, "nccl"),
    "gloo": (FLIGHT_RECORDER, "gloo"),
}
"""Below the run's directory, by the name that a piece has of it."""
_ROLE, _RANK = r"(?P<role>[A-Za-z][A-Za-z0-9_]{0,63})", r"(?P<rank>\d{1,6})"
_OF_LOGS = re.compile(rf"{_ROLE}-{_RANK}\.(?:log|stacks|heartbeat)", re.ASCII)
_OF_TIMEOUTS = re.compile(rf"nccl-timeout-{_ROLE}_{_RANK}", re.ASCII)
"""What torch writes by itself when an operation of NCCL has timed out."""
_RECORDINGS = re.compile(rf"{_ROLE}_{_RANK}", re.ASCII)
_BELOW = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Piece:
    """New bytes of a file.

    Args:
        directory: "logs", or "nccl" or "gloo" for a flight recording.
        name: of the file.
        data: to be added to it; all that is in it where it is a heartbeat.
    """

    directory: str
    name: str
    data: bytes

    @property
    def process(self) -> str | None:
        """Whose file it is, such as `actor-1` or `sglang-0`; None where no process of a run has a file of that name."""
        patterns = (_OF_LOGS, _OF_TIMEOUTS) if self.directory == "logs" else (_RECORDINGS,)
        found = next(filter(None, (pattern.fullmatch(self.name) for pattern in patterns)), None)
        return None if found is None or self.directory not in _DIRECTORIES else f"{found['role']}-{found['rank']}"

    @property
    def is_whole(self) -> bool:
        """Whether it replaces what is in the file."""
        return self.name.endswith(HEARTBEAT)

    def as_json(self) -> dict[str, str]:
        """As values that JSON has."""
        return {"directory": self.directory, "name": self.name, "data": base64.b64encode(self.data).decode()}

    @classmethod
    def from_json(cls, values: Any) -> Piece:
        """What `as_json` gave, or somebody else.

        Raises:
            ValueError: it is no piece.
        """
        try:
            directory, name, data = (str(values[key]) for key in ("directory", "name", "data"))
            return cls(directory, name, base64.b64decode(data, validate=True))
        except (KeyError, TypeError, binascii.Error):
            raise ValueError("a piece of no file") from None


@contextlib.contextmanager
def opened_directory(run: Path, directory: str, *, make: bool = False) -> Iterator[int]:
    """The descriptor of a directory below that of a run.

    Args:
        run: the run's directory.
        directory: as of a piece.
        make: it where it is missing.

    Raises:
        OSError: it is not there, or something in its place is no directory.
    """
    opened = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in _DIRECTORIES[directory]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=opened)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _BELOW, dir_fd=opened)
            os.close(opened)
            opened = inner
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def opened_file(directory: int, name: str, flags: int) -> Iterator[int]:
    """The descriptor of a regular file in a directory; nothing is waited for where there is a pipe instead.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    opened = os.open(name, flags | _BELOW | os.O_NONBLOCK, 0o644, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "no regular file", name)
        yield opened
    finally:
        os.close(opened)


@dataclass
class _Sent:
    """What has been read of a file.

    Args:
        inode: by which a file in its place is known.
        offset: of what comes next.
        before: the last bytes before it, by which a file that was begun anew is known.
        text: of a heartbeat.
    """

    inode: int
    offset: int = 0
    before: bytes = b""
    text: bytes = b""


class NewOutput:
    """The new bytes of the files of some processes, whenever they are asked for.

    Args:
        run: the directory of the run.
        processes: such as `actor-1`; files of others are left alone.
        host: name of this host, for who finds that something was left out.
    """

    def __init__(self, run: Path, processes: Collection[str], host: str) -> None:
        self._run, self._processes, self._host = run, frozenset(processes), host
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._last = ("", "")
        """The file that was read last, after which others come first."""

    def skip_present(self) -> None:
        """What is there is of an earlier start: only what is added is new."""
        for directory, name in self._files():
            with contextlib.suppress(OSError), _opened(self._run, directory, name) as descriptor:
                status = os.fstat(descriptor)
                self._sent[directory, name] = _Sent(status.st_ino, status.st_size, _before(descriptor, status.st_size))

    def read(self, most_bytes: int, most_behind: int) -> list[Piece]:
        """Some of what is new; none where nothing is.

        Args:
            most_bytes: of all pieces together, beside heartbeats and lines about what was left out.
            most_behind: bytes that a log may have which were not read yet: where it has more, its last quarter of that
                is read, after a line that says so.
        """
        found: list[Piece] = []
        rest, before = most_bytes, -1
        files = self._files()
        while before != rest:
            before = rest
            for directory, name in files:
                is_known, data = (directory, name) in self._sent, b""
                with contextlib.suppress(OSError), _opened(self._run, directory, name) as descriptor:
                    data, counted = self._new(directory, name, descriptor, min(rest, _PIECE_BYTES), most_behind)
                if data or is_known != ((directory, name) in self._sent):  # an empty log says that a rank is there
                    found.append(Piece(directory, name, data))
                    rest -= counted
                    self._last = (directory, name) if counted else self._last
        return found

    def _files(self) -> list[tuple[str, str]]:
        """Directory and name of each file that there is."""
        names: list[tuple[str, str]] = []
        for directory in _DIRECTORIES:
            with contextlib.suppress(OSError), opened_directory(self._run, directory) as opened:
                names += [(directory, name) for name in os.listdir(opened)]  # noqa: PTH208
        ours = [each for each in sorted(names) if Piece(*each, b"").process in self._processes]
        # In turn, so that none waits for ever for one that is written all the time.
        return sorted(ours, key=lambda each: each <= self._last)

    def _new(self, directory: str, name: str, descriptor: int, size: int, most_behind: int) -> tuple[bytes, int]:
        """What is new of a file, and how many bytes of it count."""
        status = os.fstat(descriptor)
        sent = self._sent.get((directory, name))
        if sent is None or sent.inode != status.st_ino or _before(descriptor, sent.offset) != sent.before:
            sent = self._sent[directory, name] = _Sent(status.st_ino)
        if name.endswith(HEARTBEAT):
            return self._changed(descriptor, sent), 0
        if directory != "logs":
            data = self._next(descriptor, sent, size if status.st_size <= _MOST_RECORDED else 0)
            return data, len(data)
        notice = self._leave_out(name, descriptor, sent, status.st_size, most_behind)
        data = self._next(descriptor, sent, size)
        return notice + data, len(data)

    def _changed(self, descriptor: int, sent: _Sent) -> bytes:
        text = os.pread(descriptor, HEARTBEAT_BYTES, 0).strip()
        if text == sent.text:
            return b""
        sent.text = text
        return text

    def _next(self, descriptor: int, sent: _Sent, size: int) -> bytes:
        data = os.pread(descriptor, size, sent.offset) if size > 0 else b""
        sent.offset += len(data)
        sent.before = _before(descriptor, sent.offset)
        return data

    def _leave_out(self, name: str, descriptor: int, sent: _Sent, size: int, most_behind: int) -> bytes:
        """Go on nearer to the end of a log that is written faster than it is sent; the line that says so."""
        if size - sent.offset <= most_behind:
            return b""
        begin = size - most_behind // 4
        line = os.pread(descriptor, _PIECE_BYTES, begin).find(b"\n")
        begin += line + 1
        left_out, sent.offset = begin - sent.offset, begin
        path = self._run / LOGS / name
        notice = f"hybridflow: {left_out:,} bytes left out here; {path} on {self._host} has them"
        return (b"" if sent.before[-1:] in (b"", b"\n") else b"\n") + f"{notice}\n".encode()


def _before(descriptor: int, offset: int) -> bytes:
    """Some bytes of a file before an offset."""
    size = min(offset, _KNOWN_BY)
    return os.pread(descriptor, size, offset - size)


@contextlib.contextmanager
def _opened(run: Path, directory: str, name: str) -> Iterator[int]:
    with opened_directory(run, directory) as opened, opened_file(opened, name, os.O_RDONLY) as descriptor:
        yield descriptor
