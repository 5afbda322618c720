"""Figures of a stream between two steps, by metric name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine3d.engine_figures import EngineFigures
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from hybridflow.rollout.dispatch import Dispatcher
    from hybridflow.rollout.ledger import Ledger

_COUNTED = {
    "evicted": metrics.STREAM_EVICTED,
    "dropped": metrics.STREAM_DROPPED,
    "carried": metrics.STREAM_CARRIED,
    "lost": metrics.STREAM_LOST,
    "withdrawn": metrics.STREAM_WITHDRAWN,
    "lost_engines": metrics.STREAM_LOST_ENGINES,
}
_TOTALS = ("retracted", "batches", "batch_tokens", "prompt_tokens", "cached_tokens", "resent", "continued")
"""What engines count from their start on."""


class StreamFigures:
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
        self._told: dict[int, EngineFigures] = {}
        self._totals: Counter[str] = Counter()
        self._batch_shares = self._queued_s = self._most_use = 0.0

    def count(self, what: str, number: int = 1) -> None:
        """So many more groups were evicted, dropped, carried over or lost, responses withdrawn, or engines lost."""
        self._counts[what] += number

    def ended(self, sample: int, tokens: int) -> None:
        """A response of so many tokens has ended."""
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
        """What is in flight has changed."""
        self._pass()
        self._busy, self._present = dispatcher.busy, dispatcher.present
        self._in_flight, self._requests = dispatcher.tokens, dispatcher.requests

    def begin(self, engine: int, figures: EngineFigures) -> None:
        """How an engine is to which nothing was sent yet: what it has counted so far is of before."""
        self._pass()
        before = self._told.get(engine)
        self._queued += figures.queued - (before.queued if before is not None else 0)
        self._told[engine] = figures

    def lose(self, engine: int) -> None:
        """An engine is gone, with its queue."""
        self._pass()
        if (before := self._told.pop(engine, None)) is not None:
            self._queued -= before.queued

    def told(self, engine: int, figures: EngineFigures) -> None:
        """An engine says how it is."""
        before = self._told.get(engine)
        new = dict[str, int]()
        for name in _TOTALS:
            had, has = getattr(before, name, 0), getattr(figures, name)
            new[name] = has - had if has >= had else has  # it may have been started again
        self._totals.update(new)
        self.begin(engine, figures)
        share = new["batch_tokens"] / figures.cache_tokens
        self._batch_shares += share
        self._most_use = max(self._most_use, share / max(1, new["batches"]), figures.used_tokens / figures.cache_tokens)

    def collect(self, dispatcher: Dispatcher, ledger: Ledger) -> dict[str, float]:
        """All since the last call."""
        self.look(dispatcher)
        seconds = max(self._at - self._since, 1e-9)
        found: dict[str, float] = {name: self._counts[what] for what, name in _COUNTED.items()}
        found |= {
            metrics.STREAM_WAIT_TIME: 1000 * self._waited_s,
            metrics.STREAM_WAIT_SHARE: self._waited_s / seconds,
            metrics.STREAM_THROUGHPUT: self._tokens / seconds,
            metrics.STREAM_BUSY: self._busy_s / max(self._engine_s, 1e-9),
            metrics.STREAM_TOKENS_IN_FLIGHT: self._token_s / seconds,
            metrics.STREAM_REQUESTS_IN_FLIGHT: self._request_s / seconds,
            metrics.STREAM_WAITING_REQUESTS: dispatcher.waiting,
            metrics.STREAM_READY_GROUPS: ledger.ready,
            metrics.STREAM_GROUPS_UNDER_WAY: ledger.under_way,
        }
        if self._ages:
            found[metrics.STREAM_AGE_MEAN] = sum(self._ages) / len(self._ages)
            found[metrics.STREAM_AGE_MAX] = max(self._ages)
        if self._told:
            found |= self._of_engines(seconds)
        self._since, self._counts, self._tokens, self._ages = self._at, Counter(), 0, []
        self._waited_s = self._busy_s = self._engine_s = self._token_s = self._request_s = 0.0
        self._totals = Counter()
        self._batch_shares = self._queued_s = self._most_use = 0.0
        return found

    def _of_engines(self, seconds: float) -> dict[str, float]:
        totals = self._totals
        found: dict[str, float] = {
            metrics.STREAM_QUEUED_REQUESTS: self._queued_s / seconds,
            metrics.STREAM_RETRACTED: totals["retracted"],
            metrics.STREAM_RESENT: totals["resent"],
            metrics.STREAM_CONTINUED: totals["continued"],
        }
        if totals["batches"]:
            found[metrics.STREAM_CACHE_USE] = self._batch_shares / totals["batches"]
            found[metrics.STREAM_CACHE_USE_MAX] = self._most_use
        if totals["prompt_tokens"]:
            found[metrics.STREAM_PREFIX_HITS] = totals["cached_tokens"] / totals["prompt_tokens"]
        return found

    def _pass(self) -> None:
        """Time has passed with things as they were."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._busy_s += passed * self._busy
        self._engine_s += passed * self._present
        self._token_s += passed * self._in_flight
        self._request_s += passed * self._requests
        self._queued_s += passed * self._queued
