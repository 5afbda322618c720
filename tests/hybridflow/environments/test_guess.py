"""The game of numbers: higher, lower, and a reward for the right one."""

from __future__ import annotations

import asyncio

import pytest

from hybridflow.environments.environment import Observation, Task, Turn
from hybridflow.environments.guess import Guess


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", Observation(reward=1.0, done=True)),
        (" 4 ", Observation(reward=1.0, done=True)),
        ("3", Observation("+")),
        ("12", Observation("-")),
        *((text, Observation("?", counts={"unknown": 1})) for text in ("", "four", "-4", "\u0664", "9" * 5000)),
    ],
)
def test_a_guess_is_answered(text: str, answer: Observation) -> None:
    async def play() -> Observation:
        game = Guess()
        assert await game.reset(Task("1-7", "4")) == Observation()
        return await game.step(Turn(text))

    assert asyncio.run(play()) == answer
