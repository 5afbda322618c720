"""An environment that waits. Its processes import nothing else of the benchmark."""

import asyncio

from hybridflow.environments.environment import Observation, Task, Turn


class Waiting:
    """Answers each turn after some seconds, and ends the episode after some turns."""

    def __init__(self, seconds: float, turns: int) -> None:
        self._seconds, self._left = seconds, turns

    async def reset(self, task: Task) -> Observation:
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        await asyncio.sleep(self._seconds)
        self._left -= 1
        return Observation("0123", reward=1.0, done=not self._left)

    async def close(self) -> None:
        return None
