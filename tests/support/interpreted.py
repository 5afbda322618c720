"""Triton's kernels on the CPU, under its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def run_interpreted(function: Callable[[str], None], *, interpret: bool = True) -> None:
    """Call `function("cpu")`, of a module, where kernels are interpreted; a failure of it is one here.

    Without `interpret` they may be compiled there, for a GPU that is not there.
    """
    # In a process of its own, because Triton asks when it is imported.
    code = f"from {function.__module__} import {function.__name__} as function; function('cpu')"
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": root}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
