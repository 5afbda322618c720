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
    titles: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):  # those before what they have started
        with contextlib.suppress(psutil.NoSuchProcess):  # a compiler, perhaps
            title = " ".join(process.cmdline()[:1])
            if title.startswith(_TITLE) and process.ppid() not in titles:  # a rank's forks have its title
                titles[process.pid] = title.removeprefix("sglang::")
    descriptors: dict[int, str] = {}
    for pid, title in titles.items():
        with contextlib.suppress(OSError):  # a system without, where SGLang's own watch is all
            descriptors[os.pidfd_open(pid)] = f"{title} (pid={pid})"
    return descriptors
