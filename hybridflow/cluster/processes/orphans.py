"""Directories of runs, each held by a lock beside it, and what is left of those whose owner is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from engine3d import run_files
from hybridflow.cluster.processes import watchdog

_PREFIX = "hf-ray-"
_LOCK_NAME = re.compile(rf"{_PREFIX}{run_files.RANDOM}{re.escape(watchdog.LOCK)}")
_LONGEST_PARENT = 24


def remove_orphans() -> None:
    """Remove what runs of this machine have left whose driver and watchdog were killed together.

    The starts of Ray and of an engine do so too; this is for a run that needs neither.
    """
    _remove_orphans(parent())
    run_files.remove_orphans()


def parent() -> Path:
    """Directory of Ray's directories: the path of a socket must stay below 108 characters; Ray itself takes 65."""
    temporary = tempfile.gettempdir()
    return Path(temporary if len(temporary) <= _LONGEST_PARENT else "/tmp")


def run_directory(where: Path) -> tuple[str, TextIO]:
    """A new directory for Ray's files, and the lock by which this process owns it.

    Those whose owner is gone are removed first: where driver and watchdog were killed together, nobody was left to.
    """
    _remove_orphans(where)
    while True:
        # Beside the directory, because who has a file open in it is taken for a process of the run.
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=watchdog.LOCK, dir=where)
        os.close(descriptor)
        owned = _hold(Path(name))
        if Path(name).exists():  # another run may have taken it for an orphan's before it was locked
            break
        owned.close()
    directory = Path(name).with_suffix("")
    directory.mkdir(mode=0o700)
    return str(directory), owned


def give_up(owned: TextIO) -> None:
    """Remove the lock of a directory that is gone."""
    Path(owned.name).unlink(missing_ok=True)
    owned.close()


def _remove_orphans(where: Path) -> None:
    for lock in run_files.named_like(where, _LOCK_NAME):
        with contextlib.suppress(OSError), run_files.open_own(lock) as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            directory = lock.with_suffix("")
            if directory.exists(follow_symlinks=False) and not run_files.is_own(directory.lstat(), stat.S_IFDIR):
                continue
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink()


def _hold(path: Path) -> TextIO:
    lock = path.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock
