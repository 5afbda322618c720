"""Lock of a run's directory, and the move of an earlier run's directory."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from pathlib import Path
from typing import TextIO

from engine3d.checkpoint.manifest import MANIFEST
from engine3d.errors import UserError
from engine3d.input_files import FileError, read_json_object
from hybridflow.errors.log import log
from hybridflow.rundir.file_names import CHECKPOINTS, METRICS, PHASE, RECIPE
from hybridflow.rundir.private import MODE, keep_private

SETTING = "run_dir/name"
LOCK = ".lock"
# Somebody who watches holds it for a moment, to see whether the run does.
_ATTEMPTS, _AGAIN_S = 3, 0.05
SHARDS = "shards"
"""Files in which the actor's ranks describe the memory of their weights."""
WEIGHTS = "weights"
"""Directory of an export of the actor while engines are compared with it."""


def claim(
    directory: Path,
    *,
    in_place: bool = False,
    overwrite: bool = False,
    private: bool = False,
    lock: TextIO | None = None,
) -> TextIO:
    """Make an empty directory of a run, and hold it until the returned file is closed.

    With `in_place` the run that is there continues: only files that its processes left behind are removed.

    Args:
        directory: of the run.
        in_place: True if the run that is there continues.
        overwrite: move an earlier run's directory aside.
        private: keep it, and all that this process creates from now on, to this user.
        lock: of `hold`, if the directory is held already.

    Raises:
        UserError: another process holds it, it cannot be made, or an earlier run has it and is not to be moved.
    """
    if private:
        keep_private()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(directory, SETTING)
        if in_place:
            for left_over in (directory / SHARDS, directory / WEIGHTS):
                shutil.rmtree(left_over, ignore_errors=True)
        elif (directory / RECIPE).exists():
            if not overwrite:
                try:
                    _check_unused(directory)
                except UserError:
                    lock.close()
                    raise
            log.info(f"{directory}: the earlier run is kept in {move_aside(directory)}")
            directory.mkdir()
            lock.close()
            lock = hold(directory, SETTING)
        elif len(list(directory.iterdir())) > 1:
            raise UserError(f"{SETTING}: {directory} holds files that are no run's; choose another name")
        if private:
            directory.chmod(MODE)
    except OSError as error:
        raise UserError(f"{SETTING}: cannot make {directory}: {error.strerror}") from None
    return lock


def check_free(directory: Path) -> None:
    """Refuse a run's directory that has a run, but for one that ended before it had done anything.

    Raises:
        UserError: the run is going on, or has ended; names what to write.
    """
    if (directory / RECIPE).exists():
        hold(directory, SETTING).close()
        _check_unused(directory)


def _check_unused(directory: Path) -> None:
    if _ended_at_start(directory):
        return
    saved = any((directory / CHECKPOINTS).glob(f"*/{MANIFEST}"))
    resumed = "; resume=auto continues it" if saved else ", without a checkpoint for resume=auto"
    raise UserError(
        f"name: {directory} has a run already{resumed}; overwrite=true starts afresh and keeps it as "
        f"{free_name(directory).name}, name=OTHER takes another directory"
    )


def _ended_at_start(directory: Path) -> bool:
    """True if all that the run wrote is how far its start had come."""
    try:
        phase = read_json_object(directory / PHASE).get("phase")
        written = (directory / METRICS).exists() and (directory / METRICS).stat().st_size
    except (OSError, FileError):
        return False
    return phase in ("start", "load") and not written and not (directory / CHECKPOINTS).exists()


def move_aside(path: Path) -> Path:
    """Keep what is at `path` under the first free name of `<name>.1`, `<name>.2` and so on; the new path."""
    return path.rename(free_name(path))


def free_name(path: Path) -> Path:
    """The first of `<name>.1`, `<name>.2` and so on that is not there."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())


def hold(directory: Path, setting: str) -> TextIO:
    """Hold a directory against other runs until the returned file is closed or this process ends.

    Raises:
        UserError: another process holds it, or it cannot be written to; names the setting that it comes from.
    """
    try:
        # Without waiting for the other end, should it be a named pipe.
        lock = os.fdopen(os.open(directory / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666), "w")
    except OSError as error:
        raise UserError(f"{setting}: cannot write to {directory / LOCK}: {error.strerror}") from None
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not attempts_left:
                lock.close()
                locked = f"{setting}: a run in {directory} is going on; choose another name or directory"
                raise UserError(locked) from None
            time.sleep(_AGAIN_S)
    return lock
