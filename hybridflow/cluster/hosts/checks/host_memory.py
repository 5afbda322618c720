"""Memory that this machine has for a run."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Limits of control groups 2, where "max" is no limit, and 1, where more than any machine has is none."""


def machine_bytes(groups: Path = _GROUPS) -> int:
    """Memory that this process's machine has, or its container's share of it.

    Args:
        groups: where control groups say how much they may take.
    """
    limits = [int(psutil.virtual_memory().total)]
    for name in _LIMITS:
        try:
            limits.append(int((groups / name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)
