"""Files that SGLang's processes leave when they are killed: all are named after the engine's run, and go with it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def make_run_directory() -> Path:
    """A new temporary directory for the processes of one engine."""
    return Path(tempfile.mkdtemp(prefix="engine3d-rollout-"))


def segment_name(name: str, run_directory: Path) -> str:
    """The name of a shared memory segment of this run."""
    return f"{name}-{run_directory.name}"


def remove_run_files(run_directory: Path) -> None:
    """Remove the run's directory and its segments. Processes that have them open keep what they have."""
    shutil.rmtree(run_directory, ignore_errors=True)
    for segment in _SHARED_MEMORY.glob(f"*-{run_directory.name}*"):
        segment.unlink(missing_ok=True)
