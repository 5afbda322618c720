"""Putting things away must not hide why it came to that."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def cleaning(what: str, *, needed: bool = True) -> Iterator[None]:
    """Put `what` away in the block.

    Where an exception is on its way, an error of the block becomes a note of it, shown below its message. Else it
    is raised, or reported in one line where nothing depends on it.

    Args:
        needed: whether what was done before is in vain without it.
    """
    first = sys.exception()
    try:
        yield
    except Exception as error:
        cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        if first is not None:
            first.add_note(f"{what}: {cause}")
        elif needed:
            raise
        else:
            print(f"{what}: {cause}", file=sys.stderr, flush=True)
