"""What makes starts quicker and changes nothing else. ENGINE3D_QUICK_START=0 does without all of it.

Each part saves a second or more of a start: the garbage collector and a look at all installed packages are kept out
of imports (`imports`), packages of which nothing is used are not imported by those who find them (`leave_out`), and
kernels are compiled side by side (`jit_kernels`).
"""

from __future__ import annotations

import os
import sys

VARIABLE = "ENGINE3D_QUICK_START"
"""Environment variable; "0" switches all of this package off."""


def is_on() -> bool:
    """Whether starts are to be quick."""
    return os.environ.get(VARIABLE) != "0"


def leave_out(*packages: str) -> None:
    """Have packages that are not imported yet be taken for absent in this process."""
    if is_on():
        for name in packages:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
