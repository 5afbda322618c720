"""An event loop whose clock stands still while anything can be done, and jumps to the next timer where nothing can."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("virtual clock: nothing is scheduled, and all wait")
        self.now += timeout
        return super().select(0)


class VirtualClock(asyncio.SelectorEventLoop):
    """The loop. `time()` is in seconds from 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run[T](action: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run a coroutine on a virtual clock. Return its result and the time at which it ended."""
    loop = VirtualClock()
    try:
        return loop.run_until_complete(action), loop.time()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
