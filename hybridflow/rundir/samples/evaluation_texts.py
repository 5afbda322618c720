"""Responses to the prompts of held-out sets as texts: a file for each measurement of a set.

evaluations/NAME/step-00000010.jsonl        one JSON object a line: a prompt, and the first response to it
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.input_files import JsonError, parse_json
from engine3d.json_records import record_of
from hybridflow.rundir.atomic_files import replace_file, whole_lines

_FILE = re.compile(r"step-(\d{8,})\.jsonl")


@dataclass(frozen=True)
class EvaluationText:
    """A prompt of a set with the first response to it.

    Args:
        index: of the prompt in its set.
        prompt, response: their texts.
        answer: of the data, as reward functions get it.
        reward: of the response; None where it got none.
        passing: how many of the responses to the prompt passed.
        scored: of how many that got a reward.
    """

    index: int
    prompt: str
    response: str
    answer: Any
    reward: float | None
    passing: int
    scored: int


def text_file(directory: Path, name: str, step: int) -> Path:
    """Return the file of a measurement's texts.

    Args:
        directory: of all sets.
        name: of the set.
        step: after which it was measured.
    """
    return directory / name / f"step-{step:08d}.jsonl"


def write_texts(path: Path, texts: Sequence[EvaluationText]) -> None:
    """Write the texts of a measurement, all or none of them.

    Raises:
        OSError: it could not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(dataclasses.asdict(text), ensure_ascii=False, default=str) for text in texts)
    replace_file(path, "".join(f"{line}\n" for line in lines))


def read_texts(path: Path) -> list[EvaluationText]:
    """The texts of a measurement.

    Raises:
        UserError: naming the file and a line that is no such text.
    """
    texts = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            texts.append(record_of(EvaluationText, parse_json(line)))
        except JsonError as error:
            raise UserError(f"{path}:{number}: {line[:60]!r} is no text of an evaluation: {error}") from None
    return texts


def steps_with_texts(directory: Path) -> dict[str, list[int]]:
    """The steps after which each set has texts, in order, by the name of the set.

    Args:
        directory: of all sets; it need not be there.
    """
    if not directory.is_dir():
        return {}
    steps_of_set = {}
    for folder in sorted(entry for entry in directory.iterdir() if entry.is_dir()):
        steps = sorted(int(match[1]) for entry in folder.iterdir() if (match := _FILE.fullmatch(entry.name)))
        if steps:
            steps_of_set[folder.name] = steps
    return steps_of_set


def forget_after(directory: Path, step: int) -> None:
    """Remove the texts of measurements after a step, which a run that resumes makes again.

    Raises:
        OSError: it could not.
    """
    for name, steps in steps_with_texts(directory).items():
        for later in steps:
            if later > step:
                text_file(directory, name, later).unlink()
