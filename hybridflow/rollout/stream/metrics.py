"""Metrics of a stream between two steps, by name."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine3d.rollout.requests import EngineStats
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from hybridflow.rollout.dispatch import Dispatcher
    from hybridflow.rollout.ledger import Ledger

_COUNTED = {
    "evicted": metrics.STREAM_EVICTED,
    "dropped": metrics.STREAM_DROPPED,
    "carried": metrics.STREAM_CARRIED,
    "lost": metrics.STREAM_LOST,
    "reclaimed": metrics.STREAM_RECLAIMED,
    "lost_engines": metrics.STREAM_LOST_ENGINES,
}
_TOTALS = (
    "retracted",
    "batches",
    "batch_tokens",
    "prompt_tokens",
    "cached_tokens",
    "resent",
    "continued",
    "verified",
    "accepted",
)
"""Counts of an engine since its start."""
_MOST_BUSY = 4096
"""Most times in which engines were busy that are reported for a step; the last ones."""


class StreamMetrics:
    """Adds up what happens, and forgets it as it is collected.

    Args:
        engines: how many there are.
        clock: in seconds.
    """

    def __init__(self, engines: int, clock: Callable[[], float]) -> None:
        self._present, self._clock = engines, clock
        self._counts: Counter[str] = Counter()
        self._tokens = 0
        self._waited_s = 0.0
        self._began = self._since = self._at = clock()
        self._busy = self._requests = self._queued = 0
        self._in_flight = 0.0
        self._busy_s = self._engine_s = self._token_s = self._request_s = 0.0
        self._ended_at: dict[int, float] = {}
        self._ages: list[float] = []
        self._last_stats: dict[int, EngineStats] = {}
        self._totals: Counter[str] = Counter()
        self._batch_shares = self._queued_s = self._most_use = 0.0

    def count(self, what: str, number: int = 1) -> None:
        """Count groups that were evicted, dropped, carried over or lost, requests reclaimed, or engines lost."""
        self._counts[what] += number

    def ended(self, sample: int, tokens: int) -> None:
        """Count a response that ended with this many tokens."""
        self._tokens += tokens
        self._ended_at[sample] = self._clock()

    def took(self, samples: Iterable[int]) -> None:
        """A step learns from these. What ended before a restart counts from the restart on."""
        now = self._clock()
        self._ages += [now - self._ended_at.get(sample, self._began) for sample in samples]

    def forget(self, samples: Iterable[int]) -> None:
        """No step will learn from these any more."""
        for sample in samples:
            self._ended_at.pop(sample, None)

    def waited(self, seconds: float) -> None:
        """A step has waited for its groups."""
        self._waited_s += seconds

    def look(self, dispatcher: Dispatcher) -> None:
        """Read the requests in flight, after they have changed."""
        self._pass()
        self._busy, self._present = dispatcher.busy, dispatcher.present
        self._in_flight, self._requests = dispatcher.tokens, dispatcher.requests

    def begin(self, engine: int, stats: EngineStats) -> None:
        """Record the stats of an engine before anything is sent to it. Its counts up to now are of no interest."""
        self._pass()
        before = self._last_stats.get(engine)
        self._queued += stats.queued - (before.queued if before is not None else 0)
        self._last_stats[engine] = stats

    def remove_engine(self, engine: int) -> None:
        """An engine is gone, with its queue."""
        self._pass()
        if (before := self._last_stats.pop(engine, None)) is not None:
            self._queued -= before.queued

    def update(self, engine: int, stats: EngineStats) -> None:
        """An engine says how it is."""
        before = self._last_stats.get(engine)
        new = dict[str, int]()
        for name in _TOTALS:
            had, has = getattr(before, name, 0), getattr(stats, name)
            new[name] = has - had if has >= had else has  # it may have been started again
        self._totals.update(new)
        self.begin(engine, stats)
        share = new["batch_tokens"] / stats.cache_tokens
        self._batch_shares += share
        self._most_use = max(self._most_use, share / max(1, new["batches"]), stats.used_tokens / stats.cache_tokens)

    def collect(self, dispatcher: Dispatcher, ledger: Ledger) -> dict[str, float]:
        """All since the last call."""
        self.look(dispatcher)
        seconds = max(self._at - self._since, 1e-9)
        collected: dict[str, float] = {name: self._counts[what] for what, name in _COUNTED.items()}
        collected |= {
            metrics.STREAM_WAIT_TIME: 1000 * self._waited_s,
            metrics.STREAM_WAIT_SHARE: self._waited_s / seconds,
            metrics.STREAM_THROUGHPUT: self._tokens / seconds,
            metrics.STREAM_BUSY: self._busy_s / max(self._engine_s, 1e-9),
            metrics.STREAM_TOKENS_IN_FLIGHT: self._token_s / seconds,
            metrics.STREAM_REQUESTS_IN_FLIGHT: self._request_s / seconds,
            metrics.STREAM_WAITING_REQUESTS: dispatcher.waiting,
            metrics.STREAM_READY_GROUPS: ledger.ready,
            metrics.STREAM_GROUPS_IN_FLIGHT: ledger.in_flight,
        }
        if self._ages:
            collected[metrics.STREAM_AGE_MEAN] = sum(self._ages) / len(self._ages)
            collected[metrics.STREAM_AGE_MAX] = max(self._ages)
        if self._last_stats:
            collected |= self._of_engines(seconds)
        self._since, self._counts, self._tokens, self._ages = self._at, Counter(), 0, []
        self._waited_s = self._busy_s = self._engine_s = self._token_s = self._request_s = 0.0
        self._totals = Counter()
        self._batch_shares = self._queued_s = self._most_use = 0.0
        return collected

    def _of_engines(self, seconds: float) -> dict[str, float]:
        totals = self._totals
        values: dict[str, float] = {
            metrics.STREAM_QUEUED_REQUESTS: self._queued_s / seconds,
            metrics.STREAM_RETRACTED: totals["retracted"],
            metrics.STREAM_RESENT: totals["resent"],
            metrics.STREAM_CONTINUED: totals["continued"],
        }
        if totals["batches"]:
            values[metrics.STREAM_CACHE_USE] = self._batch_shares / totals["batches"]
            values[metrics.STREAM_CACHE_USE_MAX] = self._most_use
        if totals["prompt_tokens"]:
            values[metrics.STREAM_PREFIX_HITS] = totals["cached_tokens"] / totals["prompt_tokens"]
        if totals["verified"]:
            values[metrics.ROLLOUT_ACCEPTANCE_LENGTH] = 1 + totals["accepted"] / totals["verified"]
        return values

    def _pass(self) -> None:
        """Time has passed with things as they were."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._busy_s += passed * self._busy
        self._engine_s += passed * self._present
        self._token_s += passed * self._in_flight
        self._request_s += passed * self._requests
        self._queued_s += passed * self._queued


class BusyTimes:
    """Times in which engines had requests in flight.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[int, float] = {}
        self._ended: deque[tuple[int, float, float]] = deque(maxlen=_MOST_BUSY)

    def begin(self, engine: int) -> None:
        """Record that an engine has requests in flight from now on, if it had none."""
        self._since.setdefault(engine, self._clock())

    def end(self, engine: int) -> None:
        """Record that an engine has nothing in flight."""
        if engine in self._since:
            self._ended.append((engine, self._since.pop(engine), self._clock()))

    def take(self) -> tuple[tuple[int, float, float], ...]:
        """Take engine, begin and end of the times since the last call; those that continue end now."""
        now, ended = self._clock(), tuple(self._ended)
        ongoing = tuple((engine, since, now) for engine, since in self._since.items())
        self._ended.clear()
        self._since = dict.fromkeys(self._since, now)
        return ended + ongoing
