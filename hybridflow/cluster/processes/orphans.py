"""Directories of Ray's files, each with an owner, and what is left of those whose owner is gone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from engine3d import run_files

_PREFIX = "hf-ray-"
_LONGEST_PARENT = 24


def remove_orphans() -> None:
    """Remove what runs of this machine have left whose driver and watchdog were killed together.

    The starts of Ray and of an engine do so too; this is for a run that needs neither.
    """
    run_files.remove_orphans(_PREFIX, parent())
    run_files.remove_orphans()


def parent() -> Path:
    """Directory of Ray's directories: the path of a socket must stay below 108 characters; Ray itself takes 65."""
    temporary = tempfile.gettempdir()
    return Path(temporary if len(temporary) <= _LONGEST_PARENT else "/tmp")


def ray_directory() -> tuple[Path, IO[bytes]]:
    """A new directory for Ray's files, and the lock by which this process owns it.

    Who has a file in it open for writing is taken for a process of the run, the owner is not: its lock is read.
    """
    return run_files.make_run_directory(_PREFIX, parent())
