"""Rewards that differ between responses and say nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32


def score(generated_texts: Sequence[str]) -> list[float]:
    """Return a number in [0, 1) for each response, decided by its text."""
    return [crc32(text.encode(errors="replace")) / 2**32 for text in generated_texts]


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return the number of one response; verl's interface."""
    return score([solution_str])[0]
