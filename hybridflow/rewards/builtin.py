"""Reward functions of the project itself: trusted and quick, so they run in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine3d.errors import UserError


def arithmetic(generated_texts: Sequence[str], *, answers: Sequence[str]) -> list[float]:
    """1 for a text that is exactly the answer, white space around it aside, else 0. One float a text.

    The complete text counts, up to its end: "42" is right for 42, and "42+1", "042", "-42" and "the answer is 42" are
    not.

    Raises:
        UserError: an answer is no text.
    """
    check_text_answers(answers)
    return [float(text.strip() == answer.strip()) for text, answer in zip(generated_texts, answers, strict=True)]


def check_text_answers(answers: Sequence[Any]) -> None:
    """Raises UserError for an answer that is no text: no generated text would be equal to it."""
    others = [answer for answer in answers if not isinstance(answer, str)]
    if others:
        other = others[0]
        raise UserError(
            f"reward arithmetic: an answer is {str(other)[:60]!r} ({type(other).__name__}), expected text or whole "
            "numbers; a function of your own may compare with anything"
        )


def length(generated_texts: Sequence[str], *, answers: Sequence[str]) -> list[float]:
    """Number of characters of each text, for any answer: a cost for long responses."""
    del answers
    return [float(len(text)) for text in generated_texts]


BUILTIN_REWARDS: dict[str, Callable[..., list[float]]] = {"arithmetic": arithmetic, "length": length}

PROVIDED_REWARDS: dict[str, str] = {
    "math": "hybridflow.rewards.mathematics:Mathematics",
    "code": "hybridflow.rewards.code.reward:Code",
    "http": "hybridflow.rewards.remote.http_reward:HttpReward",
    "judge": "hybridflow.rewards.remote.judge:Judge",
    **{name: f"hybridflow.rewards.shaping:{name}" for name in ("matches", "length_limit", "repetition", "script")},
}
"""Functions of the project that run in processes as a user's do, since their inputs may keep them busy."""

REMOTE_REWARDS = ("http", "judge")
"""Provided rewards that call a server."""

TAGS = ("<answer>", "</answer>")
"""Around the answer of a text, for "math" with `extract: tag`."""
SAMPLE_TIMEOUT_S = 5.0
"""Limit of a comparison of "math", where its arguments have none."""
CODE_TIMEOUT_S = 20.0
"""Limit of all programs of a sample of "code", where its arguments have none."""
