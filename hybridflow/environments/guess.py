"""A game of several turns with an outcome that can be verified: guess a number by answers "higher" and "lower"."""

from __future__ import annotations

from hybridflow.environments.environment import Observation, Task, Turn

HIGHER, LOWER, UNKNOWN = "+", "-", "?"


class Guess:
    """The answer of the task is the number. A turn is a guess, and the reward is 1 for the right one.

    A guess is answered by whether the number is higher or lower; another text by a question mark.
    """

    replayable = True

    async def reset(self, task: Task) -> Observation:
        self._number = int(task.answer)
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        text = turn.text.strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            return Observation(UNKNOWN, counts={"unknown": 1})
        guess = int(text)
        if guess == self._number:
            return Observation(reward=1.0, done=True)
        return Observation(HIGHER if guess < self._number else LOWER)

    async def close(self) -> None:
        return None
