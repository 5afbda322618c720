"""Processes of an engine, found by the files that they have open: those of `warm_starts` are no descendants."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from engine3d.rollout import RolloutEngine


def running(log: Path) -> list[int]:
    """Processes whose output goes to an engine's log. A zombie has no output any more."""
    return [process for process, file in _open_files("1") if file == str(log)]


def processes_of(engine: RolloutEngine) -> list[int]:
    """All processes of an engine."""
    assert engine.log_path is not None
    return running(engine.log_path.resolve())


def schedulers_of(engine: RolloutEngine) -> list[int]:
    """The schedulers that report of an engine: one of each group with attention of its own."""
    assert engine._host is not None
    reports = f"{engine._host._run_directory}/batches-"
    return sorted({process for process, file in _open_files("*") if file.startswith(reports)})


def cpu_s(*processes: int) -> float:
    """CPU time that processes have used so far."""
    ticks = 0
    for process in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _open_files(descriptors: str) -> list[tuple[int, str]]:
    files = []
    for descriptor in Path("/proc").glob(f"[0-9]*/fd/{descriptors}"):
        with contextlib.suppress(OSError):
            files.append((int(descriptor.parts[2]), str(descriptor.readlink())))
    return files
