"""Ends of an engine's ranks on this host, which SGLang sees of its own children alone.

With `attention_dp` ranks are the children of a process that hands requests out, and does not look after them.
"""

from __future__ import annotations

import contextlib
import os

import psutil

_TITLE = "sglang::scheduler"


def watched_ranks() -> dict[int, str]:
    """A descriptor for each rank's process, which can be read once that has ended, and what to call it."""
    found: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # a compiler, perhaps
            title = " ".join(process.cmdline()[:1])
            if title.startswith(_TITLE):
                found[os.pidfd_open(process.pid)] = f"{title.removeprefix('sglang::')} (pid={process.pid})"
    return found
