"""Files that only their user may read: the umask of a run's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

MASK, MODE = 0o077, 0o700
_VARIABLE = "HYBRIDFLOW_UMASK"


def keep_private() -> None:
    """Create files and directories for this user alone, here and in every process that is started from here."""
    os.umask(MASK)


@contextmanager
def umask_restored() -> Iterator[None]:
    """Restore the umask of this process at the end of the block."""
    before = _umask()
    try:
        yield
    finally:
        if before is not None:
            os.umask(int(before, 8))


def umask_environment() -> dict[str, str]:
    """Variables by which a rank, on any host, gets the umask of this process."""
    mask = _umask()
    return {_VARIABLE: mask} if mask is not None else {}


def _umask() -> str | None:
    """The umask in octal digits. `os.umask` would change that of other threads for a moment."""
    match = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return match[1] if match is not None else None


def take_umask(environment: MutableMapping[str, str]) -> None:
    """Use the umask of `umask_environment`, and remove it from the variables."""
    if (mask := environment.pop(_VARIABLE, None)) is not None:
        os.umask(int(mask, 8))
