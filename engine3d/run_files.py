"""Temporary directories with an owner, and files that SGLang's processes leave when they are killed: all have names of
the engine's run, and are removed with it.

    python run_files.py

removes those of engines whose owner is gone. Standard library only.

All users share the temporary directory and /dev/shm. Only this user's files of the expected kind are removed there, and
no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import IO

RUN_DIRECTORY_VARIABLE = "ENGINE3D_ROLLOUT_RUN_DIRECTORY"
"""Environment of an engine's processes: the run directory that they belong to."""

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "engine3d-rollout-"
_NEW = "new-"
_OWNER = "owner"
_MADE_WITHIN_S = 60.0
_RANDOM = "[a-z0-9_]{8}"
"""Pattern of the unique part of names that `tempfile` makes."""


def make_run_directory(prefix: str = _PREFIX, parent: Path | None = None) -> tuple[Path, IO[bytes]]:
    """Make a temporary directory for the processes of one run, and the lock by which this process owns it.

    Directories without an owner, and all files of their runs, are removed first. They remain where owner and host were
    killed together.

    Args:
        prefix: of its name.
        parent: of the directory; the usual one if None.
    """
    remove_orphans(prefix, parent)
    new = Path(tempfile.mkdtemp(prefix=f"{_NEW}{prefix}", dir=parent))
    (new / _OWNER).touch()
    lock = open_own(new / _OWNER)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return new.rename(new.with_name(new.name.removeprefix(_NEW))), lock


def segment_name(name: str, run_directory: Path) -> str:
    """The name of a shared memory segment of this run."""
    return f"{name}-{run_directory.name}"


def remove_run_files(run_directory: Path) -> None:
    """Remove the run's directory and its segments. Processes that have them open keep what they have."""
    segment_of_run = re.compile(rf".+-{re.escape(run_directory.name)}(?![a-z0-9_]).*", re.DOTALL)
    for segment in named_like(_SHARED_MEMORY, segment_of_run):
        with contextlib.suppress(OSError):  # somebody else removes it too
            if is_own(segment.lstat(), stat.S_IFREG):
                segment.unlink()
    shutil.rmtree(run_directory, ignore_errors=True)


def remove_orphans(prefix: str = _PREFIX, parent: Path | None = None) -> None:
    """Remove the files of runs whose owner is gone. Arguments as of `make_run_directory`."""
    parent = parent or Path(tempfile.gettempdir())
    for old in named_like(parent, re.compile(rf"{prefix}{_RANDOM}")):
        _remove_if_orphan(old)
    for unfinished in named_like(parent, re.compile(rf"{_NEW}{prefix}{_RANDOM}")):
        with contextlib.suppress(OSError):
            status = unfinished.lstat()
            if is_own(status, stat.S_IFDIR) and time.time() - status.st_mtime > _MADE_WITHIN_S:
                shutil.rmtree(unfinished, ignore_errors=True)


def _remove_if_orphan(run_directory: Path) -> None:
    try:
        if not is_own(run_directory.lstat(), stat.S_IFDIR):
            return
        with open_own(run_directory / _OWNER) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_run_files(run_directory)
    except OSError:
        pass  # it has an owner, is of another kind, or is being removed by another process


def named_like(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Paths in a directory whose complete names match a pattern; none if it cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


def is_own(status: os.stat_result, kind: int) -> bool:
    """True if a file is of this kind, such as `stat.S_IFREG`, and this user's."""
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid()


def open_own(path: Path) -> IO[bytes]:
    """Open a file of this user's for reading.

    Raises:
        OSError: there is none: nothing, a link, another kind of file, or another user's.
    """
    # Without O_NONBLOCK a FIFO would be waited for until somebody writes to it.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if is_own(os.fstat(file.fileno()), stat.S_IFREG):
        return file
    file.close()
    raise PermissionError(f"{path} is no file of this user's")


if __name__ == "__main__":
    remove_orphans()
