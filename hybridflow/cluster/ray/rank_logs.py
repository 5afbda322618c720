"""Logs of ranks on nodes that do not see the run's directory of the driver: new bytes of files, and their copies."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.rundir.file_names import FLIGHT_RECORDER, LOGS
from hybridflow.rundir.private import MODE, keep_private
from hybridflow.rundir.status.heartbeat import forget_heartbeats
from hybridflow.rundir.status.lock import SHARDS, move_aside

MOST_BYTES = 1 << 20
"""Bytes that are read at once, from all files of a node."""
_FILE_BYTES = 128 << 10
_KNOWN_BY = 64
_MOST_RECORDED = 64 << 20
"""Bytes of a flight recording: a larger one is not copied, as a part of it is of no use."""
_HEARTBEAT = ".heartbeat"


@dataclass(frozen=True, slots=True)
class NewBytes:
    """New bytes of a file.

    Args:
        file: below the run's directory.
        data: to be appended; all of a heartbeat.
    """

    file: str
    data: bytes


def files_of(processes: Iterable[str]) -> list[str]:
    """Files that ranks such as `actor-1`, or engines such as `sglang-0`, may write below the run's directory."""
    files = []
    for process in processes:
        role, _, rank = process.rpartition("-")
        files += [f"{LOGS}/{process}{suffix}" for suffix in (".log", ".stacks", _HEARTBEAT)]
        files += [f"{FLIGHT_RECORDER}/{backend}/{role}_{rank}" for backend in ("nccl", "gloo")]
        files.append(f"{LOGS}/nccl-timeout-{role}_{rank}")  # torch's, when an operation of NCCL has timed out
    return files


def make_directory(run: Path, *, in_place: bool, private: bool = False) -> None:
    """Prepare the run's directory on a node as the driver does on its own; earlier logs get another name.

    Args:
        run: the directory.
        in_place: an earlier start of the run continues.
        private: keep it, and all that this process creates from now on, to this user.

    Raises:
        UserError: nothing can be written there.
    """
    logs = run / LOGS
    if private:
        keep_private()
    try:
        run.mkdir(parents=True, exist_ok=True)
        if private:
            run.chmod(MODE)
        for left_over in (run / SHARDS, run / FLIGHT_RECORDER):
            shutil.rmtree(left_over, ignore_errors=True)
        forget_heartbeats(logs)
        with contextlib.suppress(FileNotFoundError):  # another node has the same disk, and has done it
            if not in_place and any(logs.iterdir()):
                move_aside(logs)
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir: cannot make {logs}: {error.strerror}") from None


@dataclass
class _Position:
    """Position in a file up to which it was read.

    Args:
        inode: by which another file in its place is known.
        offset: of the next byte.
        before: the last bytes before it, by which a file that was begun again is known.
        heartbeat: all bytes of one.
    """

    inode: int
    offset: int = 0
    before: bytes = b""
    heartbeat: bytes = b""


class LogReader:
    """New bytes of the files of some processes. Bytes that are there at first are of an earlier start.

    Args:
        run: the directory of the run.
        processes: such as `actor-1`.
        host: name of this host, for a line about bytes that were left out.
    """

    def __init__(self, run: Path, processes: Iterable[str], host: str) -> None:
        self._run, self._host = run, host
        self._files = files_of(processes)
        self._positions: dict[str, _Position] = {}
        for name in self._files:
            with contextlib.suppress(OSError), (run / name).open("rb") as file:
                status = os.fstat(file.fileno())
                self._positions[name] = _Position(status.st_ino, status.st_size, _before(file.fileno(), status.st_size))

    def read(self, most_behind: int) -> list[NewBytes]:
        """Read some new bytes; none where there are none.

        Args:
            most_behind: bytes of a log that may wait to be read. Where more do, its last quarter of that is read, after
                a line that says so.
        """
        new: list[NewBytes] = []
        rest = MOST_BYTES
        for name in list(self._files):
            is_known, data = name in self._positions, b""
            with contextlib.suppress(OSError), (self._run / name).open("rb") as file:
                data = self._new(name, file.fileno(), min(rest, _FILE_BYTES), most_behind)
            if data or is_known != (name in self._positions):  # an empty log says that a rank is there
                new.append(NewBytes(name, data))
                rest -= len(data)
                self._files.remove(name)  # the others come first the next time
                self._files.append(name)
        return new

    def _new(self, name: str, file: int, size: int, most_behind: int) -> bytes:
        status = os.fstat(file)
        position = self._positions.get(name)
        if position is None or position.inode != status.st_ino or _before(file, position.offset) != position.before:
            position = self._positions[name] = _Position(status.st_ino)
        if name.endswith(_HEARTBEAT):
            before, position.heartbeat = position.heartbeat, os.pread(file, _FILE_BYTES, 0)
            return position.heartbeat if position.heartbeat != before else b""
        if not name.startswith(LOGS) and status.st_size > _MOST_RECORDED:
            return b""
        notice = b""
        if name.startswith(LOGS) and status.st_size - position.offset > most_behind:
            notice = self._leave_out(name, file, position, status.st_size - most_behind // 4)
        data = os.pread(file, max(size, 0), position.offset)
        position.offset += len(data)
        position.before = _before(file, position.offset)
        return notice + data

    def _leave_out(self, name: str, file: int, position: _Position, begin: int) -> bytes:
        """Skip bytes of a log that is written faster than it is read; the line that says so."""
        begin += os.pread(file, _FILE_BYTES, begin).find(b"\n") + 1
        left_out, position.offset = begin - position.offset, begin
        notice = f"hybridflow: {left_out:,} bytes left out here; {self._run / name} on {self._host} has them"
        return (b"" if position.before[-1:] in (b"", b"\n") else b"\n") + f"{notice}\n".encode()


def _before(file: int, offset: int) -> bytes:
    """Some bytes of a file before an offset."""
    size = min(offset, _KNOWN_BY)
    return os.pread(file, size, offset - size)


def request_recordings(run: Path) -> None:
    """Request flight recordings of torch from the ranks that see a run's directory here. Raises OSError."""
    directory = run / FLIGHT_RECORDER
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


def write(run: Path, new: Sequence[NewBytes]) -> None:
    """Copy new bytes into the run's directory.

    Raises:
        OSError: a file cannot be written.
    """
    for addition in new:
        path = run / addition.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if addition.file.endswith(_HEARTBEAT):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, addition.data, 0)  # at once, for readers
            finally:
                os.close(descriptor)
        else:
            with path.open("ab") as file:
                file.write(addition.data)
