"""The responses of a stream at its client: which are under way, and which have ended and were not taken yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError
from engine3d.rollout.host.messages import Response


class Responses:
    """Filled by the thread that reads what the engine sends, emptied by the one that takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self._ended: dict[int, Response] = {}
        self._error: str | None = None
        self._further_at = time.monotonic()
        self.figures: EngineFigures | None = None
        """That the engine has told last."""

    @property
    def under_way(self) -> int:
        """How many were asked for and have not ended."""
        return len(self._under_way)

    def asked(self, samples: Iterable[int]) -> None:
        """These are under way from here on."""
        with self._changed:
            if not self._under_way:
                self._further_at = time.monotonic()
            self._under_way.update(samples)

    def add(self, responses: dict[int, Response]) -> None:
        """These have ended."""
        with self._changed:
            self._further_at = time.monotonic()
            self._under_way.difference_update(responses)
            self._ended |= responses
            self._changed.notify_all()

    def came_further(self) -> None:
        """The engine has run batches."""
        self._further_at = time.monotonic()

    def fail(self, error: str) -> None:
        """No response ends any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, timeout_s: float, stalled_s: float) -> dict[int, Response]:
        """What has ended since the last call, by sample; waits for something to, for `timeout_s` at the most.

        Raises:
            EngineError: nothing ends any more, or responses are under way and came no further for `stalled_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._error, timeout_s)
            ended, self._ended = self._ended, {}
            if ended:
                return ended
            if self._error is not None:
                raise EngineError(self._error)
            if self._under_way and time.monotonic() > self._further_at + stalled_s:
                raise EngineError(
                    f"rollout engine: {len(self._under_way)} responses came no further within {stalled_s:g} s"
                )
            return {}
