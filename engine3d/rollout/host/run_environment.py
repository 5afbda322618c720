"""The environment that SGLang's processes share with the client that has started them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine3d.run_files import RUN_DIRECTORY_VARIABLE
from engine3d.stacks import STACKS_VARIABLE, stacks_path


def run_environment(run_directory: Path, log_path: Path) -> dict[str, str]:
    """Variables by which the processes have their client's code, the files of their run, and a place for stacks.

    Args:
        run_directory: that `make_run_directory` has made for them.
        log_path: of what they print.
    """
    return {
        # The client's code, in the process and in all that it starts; not what lies in the working directory.
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "PYTHONSAFEPATH": "1",
        "TMPDIR": str(run_directory),
        RUN_DIRECTORY_VARIABLE: str(run_directory),
        STACKS_VARIABLE: str(stacks_path(log_path.absolute())),
    }
