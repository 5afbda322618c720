"""Seconds of a step as they were predicted when a run started: a file in its directory, for its report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine3d.json_records import read_record
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import PREDICTED_SECONDS


@dataclass(frozen=True)
class PredictedSeconds:
    """Seconds of a step of a run by phase, with the half-width of their intervals.

    Args:
        profile: name of the hardware profile.
        response_tokens: of each response, the longest that the recipe allows.
        seconds: by phase: "rollout", "scoring", "update", "transfer", and "step".
        intervals: relative half-width, by phase.
    """

    profile: str
    response_tokens: float
    seconds: dict[str, float]
    intervals: dict[str, float]


def write_predicted_seconds(directory: Path, predicted: PredictedSeconds) -> None:
    """Write the file. Raises OSError."""
    replace_file(directory / PREDICTED_SECONDS, json.dumps(asdict(predicted), indent=1) + "\n")


def read_predicted_seconds(directory: Path) -> PredictedSeconds | None:
    """Read the file; None where no profile fitted the run's devices.

    Raises:
        FileError: the file cannot be read, or is damaged.
    """
    return read_record(directory / PREDICTED_SECONDS, PredictedSeconds)
