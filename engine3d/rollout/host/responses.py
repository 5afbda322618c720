"""The responses of an engine at its client: which are in flight, and which have ended and were not taken yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from engine3d.engine_stats import EngineStats
from engine3d.errors import EngineError, UserError
from engine3d.rollout.requests import Response


class PendingResponses:
    """Filled by the thread that reads what the engine sends, emptied by those that take.

    Args:
        log_path: of the engine, for errors.
    """

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._ended: dict[int, Response] = {}
        self._error: str | None = None
        self._further_at = time.monotonic()
        self._done = 0
        """Complete responses among those that were last submitted together."""
        self.stats: EngineStats | None = None
        """The latest that the engine has reported."""

    def submitted(self, samples: Iterable[int]) -> None:
        """These are in flight from here on. Raises UserError, and adds none, if one is or was not taken yet."""
        with self._changed:
            if not self._in_flight:
                self._further_at = time.monotonic()
            new = set[int]()
            for sample in samples:
                if sample in self._in_flight or sample in self._ended or sample in new:
                    raise UserError(f"sample {sample} is in flight already")
                new.add(sample)
            self._in_flight |= new

    def forget(self, samples: Collection[int]) -> None:
        """Nobody takes these any more."""
        with self._changed:
            self._in_flight.difference_update(samples)
            for sample in samples:
                self._ended.pop(sample, None)

    def check_known(self, samples: Collection[int]) -> None:
        """Raise EngineError for a sample that is neither in flight nor waits to be taken."""
        with self._changed:
            for sample in samples:
                if sample not in self._in_flight and sample not in self._ended:
                    raise EngineError(f"sample {sample} is not in flight: it was not submitted, or was taken already")

    def add(self, responses: dict[int, Response]) -> None:
        """These have ended."""
        with self._changed:
            self._further_at = time.monotonic()
            self._ended |= {sample: response for sample, response in responses.items() if sample in self._in_flight}
            self._in_flight.difference_update(responses)
            self._changed.notify_all()

    def came_further(self, done: int) -> None:
        """The engine has run batches. `done`: complete responses of those that were last submitted together."""
        self._further_at, self._done = time.monotonic(), done

    def resume(self) -> None:
        """Measure a stall from now: until now the engine stood still for its weights."""
        self._further_at = time.monotonic()

    def fail(self, error: str) -> None:
        """No response ends any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, timeout_s: float, stalled_s: float, samples: Collection[int] | None) -> dict[int, Response]:
        """Responses that have ended since the last call, by sample. Waits up to `timeout_s` for one.

        Args:
            timeout_s: limit of the wait.
            stalled_s: limit of the time without progress of the engine while responses are in flight.
            samples: take no others; all if None.

        Raises:
            EngineError: nothing ends any more, or the engine is stalled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._has_ended(samples), timeout_s)
            if samples is None:
                ended, self._ended = self._ended, {}
            else:
                ended = {sample: self._ended.pop(sample) for sample in list(self._ended) if sample in samples}
            if ended:
                return ended
            if self._error is not None:
                raise EngineError(self._error)
            in_flight = sum(samples is None or sample in samples for sample in self._in_flight)
            if in_flight and time.monotonic() > self._further_at + stalled_s:
                raise EngineError(self._stalled(in_flight, stalled_s))
            return {}

    def _has_ended(self, samples: Collection[int] | None) -> bool:
        return bool(self._ended) if samples is None else any(sample in samples for sample in self._ended)

    def _stalled(self, in_flight: int, stalled_s: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() + self._further_at - time.monotonic()))
        return (
            f"rollout engine: responses came no further within {stalled_s:g} s: no token since {since}, "
            f"{self._done} of {in_flight} responses are done; log: {self._log_path}"
        )
