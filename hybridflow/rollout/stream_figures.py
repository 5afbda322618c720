"""Figures of a stream between two steps, by metric name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from hybridflow.rollout.dispatch import Dispatcher
    from hybridflow.rollout.ledger import Ledger

_COUNTED = {
    "evicted": metrics.STREAM_EVICTED,
    "dropped": metrics.STREAM_DROPPED,
    "carried": metrics.STREAM_CARRIED,
    "lost": metrics.STREAM_LOST,
}


class StreamFigures:
    """Adds up what happens, and forgets it as it is collected.

    Args:
        engines: how many there are.
        clock: in seconds.
    """

    def __init__(self, engines: int, clock: Callable[[], float]) -> None:
        self._engines, self._clock = engines, clock
        self._counts: Counter[str] = Counter()
        self._tokens = 0
        self._waited_s = 0.0
        self._since = self._at = clock()
        self._busy = 0
        self._in_flight = 0.0
        self._busy_s = self._token_s = 0.0

    def count(self, what: str, number: int = 1) -> None:
        """So many more groups were evicted, dropped, carried over or lost."""
        self._counts[what] += number

    def ended(self, tokens: int) -> None:
        """A response of so many tokens has ended."""
        self._tokens += tokens

    def waited(self, seconds: float) -> None:
        """A step has waited for its groups."""
        self._waited_s += seconds

    def look(self, dispatcher: Dispatcher) -> None:
        """What is in flight has changed."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._busy_s += passed * self._busy
        self._token_s += passed * self._in_flight
        self._busy, self._in_flight = dispatcher.busy, dispatcher.tokens

    def collect(self, dispatcher: Dispatcher, ledger: Ledger) -> dict[str, float]:
        """All since the last call."""
        self.look(dispatcher)
        seconds = max(self._at - self._since, 1e-9)
        found: dict[str, float] = {name: self._counts[what] for what, name in _COUNTED.items()}
        found |= {
            metrics.STREAM_WAIT_TIME: 1000 * self._waited_s,
            metrics.STREAM_WAIT_SHARE: self._waited_s / seconds,
            metrics.STREAM_THROUGHPUT: self._tokens / seconds,
            metrics.STREAM_BUSY: self._busy_s / seconds / self._engines,
            metrics.STREAM_TOKENS_IN_FLIGHT: self._token_s / seconds,
            metrics.STREAM_WAITING_REQUESTS: dispatcher.waiting,
            metrics.STREAM_READY_GROUPS: ledger.ready,
            metrics.STREAM_GROUPS_UNDER_WAY: ledger.under_way,
        }
        self._since, self._counts, self._tokens = self._at, Counter(), 0
        self._waited_s = self._busy_s = self._token_s = 0.0
        return found
