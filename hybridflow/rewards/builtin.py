"""Reward functions of the project itself: trusted and quick, so they run in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def arithmetic(generated_texts: Sequence[str], *, answers: Sequence[str]) -> list[float]:
    """1 for a text that is exactly the answer, white space around it aside, else 0. One float a text.

    The whole text counts, up to its end: "42" is right for 42, and "42+1", "042", "-42" and "the answer is 42" are not.
    """
    return [float(text.strip() == answer.strip()) for text, answer in zip(generated_texts, answers, strict=True)]


def length(generated_texts: Sequence[str], *, answers: Sequence[str] = ()) -> list[float]:
    """The number of characters of each text: a cost for responses that are to be short. One float a text."""
    return [float(len(text)) for text in generated_texts]


BUILTIN_REWARDS: dict[str, Callable[..., list[float]]] = {"arithmetic": arithmetic, "length": length}
