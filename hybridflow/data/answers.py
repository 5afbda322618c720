"""Reference answers of rows: missing ones, and whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hybridflow.placeholders import PLACEHOLDERS

_EXACT = 2.0**53


def is_missing(answer: Any) -> bool:
    """True for null, NaN, blank text, and lists and objects that are empty or of nothing else."""
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        return True
    if isinstance(answer, str):
        return not answer.strip()
    if isinstance(answer, dict):
        return all(map(is_missing, answer.values()))
    return isinstance(answer, list | tuple) and all(map(is_missing, answer))


def _is_whole(answer: float) -> bool:
    return answer.is_integer() and abs(answer) <= _EXACT


def as_answer(answer: Any, *, whole_numbers: bool) -> Any:
    """Convert an answer to the form that reward functions get: whole numbers as text.

    Args:
        answer: any value of JSON.
        whole_numbers: true if 5.0 stands for 5, see `AnswerCounts.whole_numbers`.
    """
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    return str(int(answer)) if whole_numbers and isinstance(answer, float) and _is_whole(answer) else answer


@dataclass
class AnswerCounts:
    """Counts of the reference answers of one source."""

    column: str | None = ""
    """Column of the answers in a file's rows; None where the source has none, and empty of other data."""
    rows: int = 0
    missing: int = 0
    first_missing: int | None = None
    """Number of the first row without an answer."""
    remarks: dict[str, int] = field(default_factory=dict)
    """Number of rows by their answer, of those in `PLACEHOLDERS`."""
    other: list[Any] = field(default_factory=list)
    """The first answer that is neither text nor a number; empty if there is none."""
    fraction: list[float] = field(default_factory=list)
    """The first number that is not whole; empty if there is none."""

    def add(self, number: int, answer: Any) -> None:
        """Count the answer of a row."""
        self.rows += 1
        if is_missing(answer):
            self.missing += 1
            self.first_missing = number if self.first_missing is None else self.first_missing
        elif isinstance(answer, str):
            if (text := answer.strip()).lower() in PLACEHOLDERS:
                self.remarks[text] = self.remarks.get(text, 0) + 1
        elif isinstance(answer, float):
            if not self.fraction and not _is_whole(answer):
                self.fraction = [answer]
        elif not self.other and (isinstance(answer, bool) or not isinstance(answer, int)):
            self.other = [answer]

    @property
    def whole_numbers(self) -> bool:
        """True if 5.0 stands for 5: pandas writes whole numbers so in a column with a missing one."""
        return not self.fraction

    def no_texts(self) -> list[Any]:
        """The first answer that reward functions do not get as text, if there is one."""
        return self.other or self.fraction
