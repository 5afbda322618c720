"""Shortcuts of starts, which change nothing else. ENGINE3D_QUICK_START=0 switches all of them off.

Each saves a second or more of a start. Imports run without the garbage collector and without a scan of all installed
packages (`imports`). Packages of which nothing is used are not imported (`leave_out`). Kernels are compiled in parallel
(`jit_kernels`).
"""

from __future__ import annotations

import os
import sys

VARIABLE = "ENGINE3D_QUICK_START"
"""Environment variable; "0" switches all of this package off."""


def is_on() -> bool:
    """True if starts take the shortcuts."""
    return os.environ.get(VARIABLE) != "0"


def leave_out(*packages: str) -> None:
    """Make packages that are not imported yet appear absent in this process."""
    if is_on():
        for name in packages:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
