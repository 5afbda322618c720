"""The file `samples.jsonl` of a run's directory: some samples of each step as texts, for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.metrics.sinks.files import begin_lines
from hybridflow.rundir.atomic_files import AppendedFile


@dataclass(frozen=True)
class SampleText:
    """One sample.

    Args:
        prompt: as the model saw it.
        response: its text.
        answer: of the data, as reward functions get it.
        reward: that it is learned from.
        version: of the weights that made it.
        sample: its id.
        row: of the data that the prompt is of, as "SOURCE:ROW"; empty where rows have no names.
    """

    prompt: str
    response: str
    answer: Any
    reward: float
    version: int
    sample: int
    row: str = ""


@dataclass(frozen=True)
class StepSamples:
    """Some samples of one step of a phase."""

    phase: str
    step: int
    samples: Sequence[SampleText]


class SampleSink:
    """One JSON object a line: phase, step, and what a `SampleText` has, `row` where it is not empty. nan is "nan".

    A run that resumes drops what it will make again, as `JsonlSink` does.
    """

    def __init__(self, path: Path, resume_from_step: int | None) -> None:
        begin_lines(path, resume_from_step)
        self._file = AppendedFile(path)

    def write(self, record: StepSamples) -> None:
        """Write the samples of a step, all or none of them.

        Raises:
            OSError: it could not.
        """
        where = {"phase": record.phase, "step": record.step}
        lines = [where | _fields(sample) for sample in record.samples]
        self._file.add("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def _fields(sample: SampleText) -> dict[str, Any]:
    fields = asdict(sample) | {"reward": _json_number(sample.reward)}
    return {name: value for name, value in fields.items() if name != "row" or value}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
