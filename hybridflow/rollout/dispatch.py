"""Which engine gets a request: the one that holds its prefix, then the one with the fewest tokens in flight, of equals
one with the newest weights.

A request waits here, and not at an engine, until one has room for it: so it goes to whichever is the first to have
room, and none idles beside another's queue. Bookkeeping alone, as `ledger`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hybridflow.batch.stream_requests import StreamRequest

_NOTES_PER_ENGINE = 16
"""How often what an engine has may be noted before the notes that hold no more are thrown away."""


@dataclass(slots=True)
class _Engine:
    number: int
    requests: int = 0
    tokens: float = 0.0
    limit: int = 0
    stamp: int = 0
    version: int = 0
    """Of its weights."""
    changes: bool = False
    """Whether these are about to be others."""
    away: bool = False
    """Whether others compute on its devices."""

    @property
    def has_room(self) -> bool:
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
        if engines < 1 or limit < 1:
            raise ValueError(f"Dispatcher: {engines} engines, {limit} requests each, expected at least 1 of both")
        self._engines = {number: _Engine(number, limit=limit) for number in range(engines)}
        self._expected = expected
        self._waiting: OrderedDict[int, StreamRequest] = OrderedDict()
        self._in_flight: dict[int, tuple[_Engine, StreamRequest, float]] = {}
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
        """Requests that no engine has room for."""
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
        """Those in flight at an engine."""
        found = self._engines.get(engine)
        return tuple(sample for sample, (each, _, _) in self._in_flight.items() if each is found)

    def in_flight(self, engine: int) -> tuple[int, float]:
        """Requests at an engine, and tokens that they are expected to have in all; none at one that was lost."""
        found = self._engines.get(engine)
        return (found.requests, found.tokens) if found is not None else (0, 0.0)

    def has(self, engine: int) -> bool:
        """Whether an engine was not lost."""
        return engine in self._engines

    def add(self, *requests: StreamRequest, first: bool = False) -> None:
        """Requests to send, behind those that wait, or before them."""
        for request in reversed(requests) if first else requests:
            self._waiting[request.sample] = request
            self._groups.setdefault(request.group, set()).add(request.sample)
            if first:
                self._waiting.move_to_end(request.sample, last=False)

    def send(self) -> Iterator[tuple[int, StreamRequest]]:
        """Requests for which an engine has room, with its number, in the order in which they came."""
        while self._waiting:
            request = next(iter(self._waiting.values()))
            engine = self._holder(request.group)
            if engine is None:
                engine = self._emptiest()
            if engine is None:
                return
            del self._waiting[request.sample]
            self._put(engine, request)
            yield engine.number, request

    def ended(self, sample: int) -> None:
        """A request is not in flight any more."""
        engine = self._take_out(sample)
        if self._engines.get(engine.number) is engine:
            self._push(engine)

    def forget(self, group: int) -> dict[int, list[int]]:
        """A group is whole or given up: no request of it is to be sent any more.

        Returns:
            Those in flight, by engine, which are to be aborted; each still ends.
        """
        self._holders.pop(group, None)
        found: dict[int, list[int]] = {}
        for sample in sorted(self._groups.get(group, ())):
            if self._waiting.pop(sample, None) is not None:
                self._leave(group, sample)
            else:
                found.setdefault(self._in_flight[sample][0].number, []).append(sample)
        return found

    def limit(self, engine: int, requests: int) -> None:
        """Let an engine have so many requests in flight; those above it end first."""
        found = self._engines[engine]
        found.limit = requests
        self._push(found)

    def version(self, engine: int) -> int:
        """Of the weights that an engine serves, or served until they began to change."""
        return self._engines[engine].version

    def sends_older_than(self, version: int) -> bool:
        """Whether a request may be sent to an engine whose weights are older."""
        engines = self._engines.values()
        return any(each.version < version and not (each.changes or each.away) for each in engines)

    def change(self, engine: int) -> None:
        """Send nothing to an engine until `serve`; what is in flight there is not touched."""
        if engine in self._engines:
            self._engines[engine].changes = True

    def serve(self, engine: int, version: int) -> None:
        """An engine serves this version of the weights from here on; one that was lost does not."""
        found = self._engines.get(engine)
        if found is not None:
            found.version, found.changes = version, False
            self._push(found)

    def serve_all(self, version: int) -> None:
        """All engines serve this version."""
        for engine in self._engines:
            self.serve(engine, version)

    def leave(self, engine: int) -> None:
        """Send nothing to an engine until `enter`, whatever it serves; what is in flight there is not touched."""
        self._engines[engine].away = True
        self._away.add(engine)

    def enter(self, engine: int) -> None:
        """An engine that left is there again."""
        found = self._engines[engine]
        found.away = False
        self._away.discard(engine)
        self._push(found)

    def lose(self, engine: int) -> tuple[StreamRequest, ...]:
        """An engine is gone. Returns what was in flight there, which is not any more."""
        lost = self._engines.pop(engine)
        self._away.discard(engine)
        requests = tuple(request for each, request, _ in self._in_flight.values() if each is lost)
        for request in requests:
            self._take_out(request.sample)
        return requests

    def gain(self, engine: int, limit: int) -> None:
        """An engine is there, with nothing in flight. Raises ValueError for one that was not lost before."""
        if engine in self._engines:
            raise ValueError(f"engine {engine} is there already")
        self._engines[engine] = _Engine(engine, limit=limit)
        self._push(self._engines[engine])

    def _holder(self, group: int) -> _Engine | None:
        """The engine that the group's last request was sent to, if it has room."""
        engine = self._engines.get(self._holders.get(group, -1))
        return engine if engine is not None and engine.has_room else None

    def _emptiest(self) -> _Engine | None:
        while self._heap:
            *_, number, stamp = self._heap[0]
            engine = self._engines.get(number)
            if engine is not None and engine.stamp == stamp and engine.has_room:
                return engine
            heapq.heappop(self._heap)
        return None

    def _put(self, engine: _Engine, request: StreamRequest) -> None:
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
        if engine.has_room:
            heapq.heappush(self._heap, self._noted(engine))
        if len(self._heap) > _NOTES_PER_ENGINE * len(self._engines):
            self._heap = [self._noted(each) for each in self._engines.values() if each.has_room]
            heapq.heapify(self._heap)

    @staticmethod
    def _noted(engine: _Engine) -> tuple[float, int, int, int, int]:
        return engine.tokens, engine.requests, -engine.version, engine.number, engine.stamp
