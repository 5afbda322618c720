"""Who may use a run's directory: its lock, and an earlier run's directory moved aside."""

from __future__ import annotations

import fcntl
import itertools
import shutil
import time
from pathlib import Path
from typing import TextIO

from engine3d.errors import UserError
from hybridflow.rundir.file_names import RECIPE

SETTING = "run_dir/name"
LOCK = ".lock"
# Somebody who watches holds it for a moment, to see whether the run does.
_ATTEMPTS, _AGAIN_S = 3, 0.05
SHARDS = "shards"
"""Where the actor's ranks say where their weights lie."""
WEIGHTS = "weights"
"""Where an export of the actor lies while engines are compared with it."""


def claim(directory: Path, *, in_place: bool = False, lock: TextIO | None = None) -> TextIO:
    """Make an empty directory, with an earlier run's moved aside, and hold it until the returned file is closed.

    With `in_place` the run that is there goes on: only what its processes left behind is removed.

    Args:
        directory: of the run.
        in_place: whether what is there goes on.
        lock: of `hold`, if the directory is held already.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(directory, SETTING)
        if in_place:
            for left_over in (directory / SHARDS, directory / WEIGHTS):
                shutil.rmtree(left_over, ignore_errors=True)
        elif (directory / RECIPE).exists():
            move_aside(directory)
            directory.mkdir()
            lock.close()
            lock = hold(directory, SETTING)
        elif len(list(directory.iterdir())) > 1:
            raise UserError(f"{SETTING}: {directory} holds files that are no run's; choose another name")
    except OSError as error:
        raise UserError(f"{SETTING}: cannot make {directory}: {error.strerror}") from None
    return lock


def move_aside(path: Path) -> Path:
    """Keep what is at `path` under the first free name of `<name>.1`, `<name>.2` and so on; the new path."""
    number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


def hold(directory: Path, setting: str) -> TextIO:
    """Hold a directory against other runs until the returned file is closed or this process ends.

    Raises:
        UserError: another process holds it, or it cannot be written to; names the setting that it comes from.
    """
    try:
        lock = (directory / LOCK).open("w")
    except OSError as error:
        raise UserError(f"{setting}: cannot write to {directory}: {error.strerror}") from None
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not attempts_left:
                lock.close()
                held = f"{setting}: a run in {directory} is going on; choose another name or directory"
                raise UserError(held) from None
            time.sleep(_AGAIN_S)
    return lock
