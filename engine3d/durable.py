"""Files brought to the disk, and errors of the system that name theirs."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system the name of its file: those of writes, such as of a full disk, have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def bring_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise  # some network file systems cannot, because names are never kept back there
    finally:
        os.close(descriptor)
