"""Bringing what was written to the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def bring_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise  # some network file systems cannot, because names are never kept back there
    finally:
        os.close(descriptor)
