"""Current step and phase of a run, in a file for observers."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Literal

Phase = Literal[
    "start", "load", "warmup", "rollout", "reward", "infer", "update", "sync", "eval", "save", "end"
]  # fmt: skip

_now: list[str] = []


def where_now() -> str:
    """Step and phase that this process has entered last, for messages."""
    return _now[0] if _now else "start"


class PhaseFile:
    """`{"step": ..., "phase": ..., "since": seconds since the epoch}`, replaced whole at every change.

    Training does not depend on it: where it cannot be written, it says what it said before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.step = 0
        """The step that the next phases belong to."""
        self.phase: Phase = "start"
        """What the run is at."""

    def enter(self, phase: Phase) -> None:
        """Say that `phase` begins."""
        self.phase = phase
        _now[:] = [f"step {self.step}, {phase}" if self.step else phase]
        scratch = self._path.with_name(f".{self._path.name}.new")
        with contextlib.suppress(OSError):
            scratch.write_text(json.dumps({"step": self.step, "phase": phase, "since": time.time()}) + "\n")
            scratch.replace(self._path)
