"""What this machine has for a run, and what its environment must not say."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from engine3d.errors import UserError

AUTHENTICATION_MODE = "RAY_AUTH_MODE"

_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of control groups version 2, where "max" is no limit, and of version 1, where more than any machine has is none."""


def machine_bytes(groups: Path = _GROUPS) -> int:
    """Memory that this process's machine has, or its container's share of it.

    Args:
        groups: where control groups say how much they may take.
    """
    found = [int(psutil.virtual_memory().total)]
    for name in _LIMITS:
        try:
            found.append(int((groups / name).read_text()))
        except (OSError, ValueError):
            continue
    return min(found)


def check_authentication() -> None:
    """Refuse an environment in which Ray would let anybody in.

    Raises:
        UserError: it says so.
    """
    mode = os.environ.get(AUTHENTICATION_MODE)
    if mode is not None and mode.lower() == "disabled":
        raise UserError(
            f"{AUTHENTICATION_MODE}={mode} in the environment: whoever reaches Ray's ports could run code as "
            f"this user; unset it, or set {AUTHENTICATION_MODE}=token"
        )
