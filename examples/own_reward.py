"""A reward of one's own, for examples/own_reward.yaml: right answers, and a little less for long ones."""

from __future__ import annotations

from collections.abc import Sequence


def score(generated_texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """One reward a response: 1 for the right sum, and 0.05 less for each character of the response."""
    pairs = zip(generated_texts, answers, strict=True)
    return [float(text.strip() == answer) - 0.05 * len(text) for text, answer in pairs]
