"""Triton's kernels on the CPU, under its interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tests.support.distributed import run_distributed


def run_interpreted(function: Callable[[str], None], *, ranks: int = 1) -> None:
    """Call `function("cpu")`, of a module, on processes where kernels are interpreted; a failure of it is one here.

    The function imports the kernels itself: what imports its module has compiled ones.
    """
    run_distributed(_interpreted, ranks, function, timeout_s=300)


def _interpreted(function: Callable[[str], None]) -> None:
    # Triton asks when it is imported, and whatever these processes are forked from has imported it.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]
    function("cpu")
