"""Contents of a trace of a rollout engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def traced_steps(trace: Path) -> list[str]:
    """The names that SGLang gives its steps, such as "step[DECODE bs=3]", in order."""
    with gzip.open(trace, "rt") as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    return [name for name in names if name.startswith("step[")]
