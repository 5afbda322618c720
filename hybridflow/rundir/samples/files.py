"""The files of a run's sample store: `samples/step-00000012.parquet`, one for each step that has learned."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from engine3d.durable import naming

_NAME = re.compile(r"step-(\d{8,18})\.parquet")
_SCRATCH = re.compile(r"\.step-\d+\.parquet\.new")


def sample_file(store: Path, step: int) -> Path:
    """Return the file of a step's samples. `store` is the directory of all."""
    return store / f"step-{step:08d}.parquet"


def stored_steps(store: Path) -> dict[int, Path]:
    """The file of each step that is there, the oldest step first. Raises OSError where it cannot be listed."""
    if not store.is_dir():
        return {}
    steps = {int(match[1]): path for path in store.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(steps.items()))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its place once it is whole and on the disk.

    A kill leaves the old file or the new one.

    Raises:
        OSError: it could not be written; nothing of it is left.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        with naming(path), scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def forget_later_steps(store: Path, step: int) -> None:
    """Remove what a run that resumes after `step` will make again, and what a kill has left half written.

    Raises:
        OSError: something cannot be removed.
    """
    if not store.is_dir():
        return
    later = [path for number, path in stored_steps(store).items() if number > step]
    for path in [*later, *(path for path in store.iterdir() if _SCRATCH.fullmatch(path.name))]:
        path.unlink(missing_ok=True)


def forget_oldest_steps(store: Path, most_bytes: int) -> None:
    """Remove the oldest steps until the others take no more bytes than that; the newest one stays in any case.

    Raises:
        OSError: something cannot be removed.
    """
    sizes = {path: path.stat().st_size for path in stored_steps(store).values()}
    total = sum(sizes.values())
    for path in list(sizes)[:-1]:
        if total <= most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= sizes[path]
