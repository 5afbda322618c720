"""What this machine has for a run."""

from __future__ import annotations

from pathlib import Path

import psutil

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_bytes(limit: Path = _LIMIT) -> int:
    """Memory that this process's machine has, or its container's share of it.

    Args:
        limit: where a control group says how much it may take: a number, or "max".
    """
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(limit.read_text()))
    except (OSError, ValueError):
        return total
