"""An environment of one's own: count down from a number, one number a turn."""

from hybridflow.environments.environment import Observation, Task, Turn


class Countdown:
    def __init__(self, start: int = 3) -> None:
        self._next = start

    async def reset(self, task: Task) -> Observation:
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        right = turn.text.strip() == str(self._next)
        self._next -= 1
        return Observation("yes" if right else "no", reward=float(right), done=self._next == 0)

    async def close(self) -> None:
        return None
