"""Choice of an engine for each request: the one that holds its prefix, else the one with the fewest tokens in flight,
and of equals the one with the newest weights.

A request waits here, and not at an engine, until one has capacity for it: it is sent to the first engine that has, and
no engine idles while another has a queue. Like `ledger`, it knows no engines and no clocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine3d.rollout.requests import Request
from hybridflow.batch.load_balance import even_ranges

_NOTES_PER_ENGINE = 16
"""Entries of the heap per engine, above which outdated ones are thrown away."""


@dataclass(slots=True)
class _Engine:
    number: int
    requests: int = 0
    tokens: float = 0.0
    limit: int = 0
    stamp: int = 0
    version: int = 0
    """Version of its weights."""
    changes: bool = False
    """True if its weights are about to change."""
    away: bool = False
    """True if other processes compute on its devices."""

    @property
    def has_capacity(self) -> bool:
        return self.requests < self.limit and not self.changes and not self.away


class Dispatcher:
    """Requests that wait, and those in flight at each engine.

    Args:
        engines: how many there are.
        limit: most requests in flight at each.
        expected: how many tokens the response to a prompt of so many may have; they count as in flight, since nobody
            knows how many there will be.
    """

    def __init__(self, engines: int, limit: int, expected: Callable[[int], float]) -> None:
        if limit < 1:
            raise ValueError(f"Dispatcher: {limit} requests at each engine, expected at least 1")
        self._engines = {number: _Engine(number, limit=limit) for number in range(engines)}
        self._expected = expected
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._in_flight: dict[int, tuple[_Engine, Request, float]] = {}
        self._groups: dict[int, set[int]] = {}
        """Samples of each group that wait or are in flight."""
        self._away: set[int] = set()
        self.busy = 0
        """Engines that have requests in flight."""
        self.tokens = 0.0
        """Tokens that all requests in flight are expected to have."""
        self._holders: dict[int, int] = {}
        self._stamps = itertools.count()
        self._heap: list[tuple[float, int, int, int, int]] = []
        for engine in self._engines.values():
            self._push(engine)

    @property
    def waiting(self) -> int:
        """Requests that no engine has capacity for."""
        return len(self._waiting)

    @property
    def requests(self) -> int:
        """Requests in flight at all engines."""
        return len(self._in_flight)

    @property
    def mean_limit(self) -> float:
        """Most requests in flight at an engine, in the mean of the engines."""
        return sum(engine.limit for engine in self._engines.values()) / max(1, len(self._engines))

    @property
    def present(self) -> int:
        """Engines that have not left, or have something in flight still."""
        return len(self._engines) - sum(not self._engines[number].requests for number in self._away)

    def samples(self, engine: int) -> tuple[int, ...]:
        """Samples in flight at an engine."""
        state = self._engines.get(engine)
        return tuple(sample for sample, (other, _, _) in self._in_flight.items() if other is state)

    def in_flight(self, engine: int) -> tuple[int, float]:
        """Requests at an engine, and tokens that they are expected to have in all; none at one that was lost."""
        state = self._engines.get(engine)
        return (state.requests, state.tokens) if state is not None else (0, 0.0)

    def have_ended(self, samples: Iterable[int]) -> bool:
        """True if none of these is in flight."""
        return self._in_flight.keys().isdisjoint(samples)

    def has(self, engine: int) -> bool:
        """True if an engine is present: it was not lost."""
        return engine in self._engines

    def add(self, *requests: Request, first: bool = False) -> None:
        """Requests to send, behind those that wait, or before them."""
        for request in reversed(requests) if first else requests:
            self._waiting[request.sample] = request
            self._groups.setdefault(request.group, set()).add(request.sample)
            if first:
                self._waiting.move_to_end(request.sample, last=False)

    def send(self) -> Iterator[tuple[int, Request]]:
        """Requests for which an engine has capacity, with its number, in the order in which they came."""
        while self._waiting:
            request = next(iter(self._waiting.values()))
            engine = self._holder(request)
            if engine is None:
                engine = self._emptiest()
            if engine is None:
                return
            del self._waiting[request.sample]
            self._put(engine, request)
            yield engine.number, request

    def send_shares(self) -> Iterator[tuple[int, Request]]:
        """All requests that wait, with the numbers of their engines: consecutive groups, as many to each."""
        groups = list(dict.fromkeys(request.group for request in self._waiting.values()))
        shares = zip(self._engines, even_ranges(len(groups), len(self._engines)), strict=True)
        engine_of = {groups[index]: engine for engine, share in shares for index in share}
        while self._waiting:
            _, request = self._waiting.popitem(last=False)
            engine = self._engines[engine_of[request.group]]
            self._put(engine, request)
            yield engine.number, request

    def ended(self, sample: int) -> None:
        """Record that a request has ended."""
        engine = self._take_out(sample)
        if self._engines.get(engine.number) is engine:
            self._push(engine)

    def forget(self, group: int) -> dict[int, list[int]]:
        """Send no more requests of a group, which is complete or given up.

        Returns:
            Those in flight, by engine, which are to be aborted; each still ends.
        """
        self._holders.pop(group, None)
        aborted: dict[int, list[int]] = {}
        for sample in sorted(self._groups.get(group, ())):
            if self._waiting.pop(sample, None) is not None:
                self._leave(group, sample)
            else:
                aborted.setdefault(self._in_flight[sample][0].number, []).append(sample)
        return aborted

    def limit(self, engine: int, requests: int) -> None:
        """Set the most requests in flight at an engine. Those above it end first."""
        state = self._engines[engine]
        state.limit = requests
        self._push(state)

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that an engine serves; 0 without engines."""
        return max((engine.version for engine in self._engines.values()), default=0)

    def version(self, engine: int) -> int:
        """Version of the weights that an engine serves, or served until they began to change."""
        return self._engines[engine].version

    def sends_older_than(self, version: int) -> bool:
        """True if a request may be sent to an engine whose weights are older."""
        engines = self._engines.values()
        return any(engine.version < version and not (engine.changes or engine.away) for engine in engines)

    def change(self, engine: int) -> None:
        """Send nothing to an engine until `serve`; what is in flight there is not touched."""
        if engine in self._engines:
            self._engines[engine].changes = True

    def serve(self, engine: int, version: int) -> None:
        """An engine serves this version of the weights from here on; one that was lost does not."""
        state = self._engines.get(engine)
        if state is not None:
            state.version, state.changes = version, False
            self._push(state)

    def serve_all(self, version: int) -> None:
        """All engines serve this version."""
        for engine in self._engines:
            self.serve(engine, version)

    def leave(self, engine: int) -> None:
        """Send nothing to an engine until `enter`, whatever it serves; what is in flight there is not touched."""
        self._engines[engine].away = True
        self._away.add(engine)

    def enter(self, engine: int) -> None:
        """Send requests again to an engine that left."""
        state = self._engines[engine]
        state.away = False
        self._away.discard(engine)
        self._push(state)

    def remove_engine(self, engine: int) -> tuple[Request, ...]:
        """Remove a lost engine. Returns the requests that were in flight there."""
        lost = self._engines.pop(engine)
        self._away.discard(engine)
        requests = tuple(request for holder, request, _ in self._in_flight.values() if holder is lost)
        for request in requests:
            self._take_out(request.sample)
        return requests

    def add_engine(self, engine: int, limit: int) -> None:
        """Add an engine, with nothing in flight. Raises ValueError for one that is present."""
        if engine in self._engines:
            raise ValueError(f"engine {engine} is there already")
        self._engines[engine] = _Engine(engine, limit=limit)
        self._push(self._engines[engine])

    def _holder(self, request: Request) -> _Engine | None:
        """The engine that has the request's prefix, or that the group's last request was sent to, if it has room."""
        number = self._holders.get(request.group, -1) if request.engine is None else request.engine
        engine = self._engines.get(number)
        return engine if engine is not None and engine.has_capacity else None

    def _emptiest(self) -> _Engine | None:
        while self._heap:
            *_, number, stamp = self._heap[0]
            engine = self._engines.get(number)
            if engine is not None and engine.stamp == stamp and engine.has_capacity:
                return engine
            heapq.heappop(self._heap)
        return None

    def _put(self, engine: _Engine, request: Request) -> None:
        tokens = request.tokens + self._expected(request.tokens)
        self._in_flight[request.sample] = (engine, request, tokens)
        self.busy += not engine.requests
        engine.requests += 1
        engine.tokens += tokens
        self.tokens += tokens
        self._holders[request.group] = engine.number
        self._push(engine)

    def _take_out(self, sample: int) -> _Engine:
        engine, request, tokens = self._in_flight.pop(sample)
        self._leave(request.group, sample)
        engine.requests -= 1
        engine.tokens -= tokens
        self.busy -= not engine.requests
        self.tokens -= tokens
        return engine

    def _leave(self, group: int, sample: int) -> None:
        samples = self._groups[group]
        samples.discard(sample)
        if not samples:
            del self._groups[group]

    def _push(self, engine: _Engine) -> None:
        """Note how much an engine has; what was noted before does not hold any more."""
        engine.stamp = next(self._stamps)
        if engine.has_capacity:
            heapq.heappush(self._heap, self._noted(engine))
        if len(self._heap) > _NOTES_PER_ENGINE * len(self._engines):
            self._heap = [self._noted(other) for other in self._engines.values() if other.has_capacity]
            heapq.heapify(self._heap)

    @staticmethod
    def _noted(engine: _Engine) -> tuple[float, int, int, int, int]:
        return engine.tokens, engine.requests, -engine.version, engine.number, engine.stamp
