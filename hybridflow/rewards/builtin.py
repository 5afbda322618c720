"""Reward functions of the project itself: trusted and quick, so they run in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine3d.errors import UserError


def arithmetic(generated_texts: Sequence[str], *, answers: Sequence[str]) -> list[float]:
    """1 for a text that is exactly the answer, white space around it aside, else 0. One float a text.

    The whole text counts, up to its end: "42" is right for 42, and "42+1", "042", "-42" and "the answer is 42" are not.

    Raises:
        UserError: an answer is no text.
    """
    check_text_answers(answers)
    return [float(text.strip() == answer.strip()) for text, answer in zip(generated_texts, answers, strict=True)]


def check_text_answers(answers: Sequence[Any]) -> None:
    """Raises UserError where one is no text, which no generated text would be equal to."""
    others = [answer for answer in answers if not isinstance(answer, str)]
    if others:
        other = others[0]
        raise UserError(
            f"reward arithmetic: an answer is {str(other)[:60]!r} ({type(other).__name__}), expected text or whole "
            "numbers; a function of your own may compare with anything"
        )


def length(generated_texts: Sequence[str], *, answers: Sequence[str]) -> list[float]:
    """The number of characters of each text, whatever the answer: a cost where responses are to be short."""
    del answers
    return [float(len(text)) for text in generated_texts]


BUILTIN_REWARDS: dict[str, Callable[..., list[float]]] = {"arithmetic": arithmetic, "length": length}

PROVIDED_REWARDS: dict[str, str] = {
    "math": "hybridflow.rewards.mathematics:Mathematics",
    "http": "hybridflow.rewards.remote.http_reward:HttpReward",
    "judge": "hybridflow.rewards.remote.judge:Judge",
    **{name: f"hybridflow.rewards.shaping:{name}" for name in ("matches", "length_limit", "repetition", "script")},
}
"""Functions of the project that run in processes as a user's do, since what they are given may keep them busy."""

REMOTE_REWARDS = ("http", "judge")
"""Those of them that ask a server."""

TAGS = ("<answer>", "</answer>")
"""Around the answer of a text, for "math" with `extract: tag`."""
SAMPLE_TIMEOUT_S = 5.0
"""Limit of a comparison of "math", where its arguments have none."""
