"""An engine that only counts tokens: requests of one batch all come further at the rate that its size allows."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hybridflow.batch.stream_requests import Begun, Ended, SampleEnd, StreamRequest


class StandInEngine:
    """Continuous batching by a formula.

    Args:
        slots: most requests that run at the same time; others wait in their order.
        step_s: seconds of a decoding step of so many requests.
        length: tokens of the response to a request.
        version: of the weights that are served.
    """

    def __init__(
        self,
        slots: int,
        step_s: Callable[[int], float],
        length: Callable[[StreamRequest], int],
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._slots, self._step_s, self._length, self._version = slots, step_s, length, version
        self._waiting: deque[StreamRequest] = deque()
        self._running: dict[int, tuple[StreamRequest, float, int]] = {}
        self._ends: list[tuple[float, int]] = []
        self._progress = self._at = 0.0
        self._ended: list[SampleEnd] = []
        self._timer: asyncio.TimerHandle | None = None
        self._told = asyncio.Event()
        self._drained = asyncio.Event()
        self._begins = self._runs = True
        self.busy_s = 0.0
        """For how long it had something to do."""
        self.slot_s = 0.0
        """The same, times the share of its slots that were in use."""
        self.tokens = 0.0

    async def submit(self, requests: Sequence[StreamRequest]) -> None:
        self._advance()
        self._waiting.extend(requests)
        self._fill()

    async def ended(self) -> Ended:
        while not self._ended:
            self._told.clear()
            await self._told.wait()
        ended, self._ended = self._ended, []
        return Ended(ended)

    async def begin_weights(self, *, wait: bool) -> None:
        """Begin nothing until `commit_weights`. What runs ends, if `wait`, before this returns; or stands still."""
        self._advance()
        self._begins, self._runs = False, wait
        while wait and self._running:
            self._drained.clear()
            await self._drained.wait()
        self._fill()

    def commit_weights(self) -> None:
        """Go on, with the version that is served now."""
        self._advance()
        self._begins = self._runs = True
        self._fill()

    async def abort(self, samples: Sequence[int]) -> None:
        self._advance()
        for sample in samples:
            if sample in self._running:
                request, end, oldest = self._running.pop(sample)
                done = self._length(request) - int(end - self._progress)
                self._ended.append(SampleEnd(sample, request.group, request.place, done, oldest, False))
            elif found := [request for request in self._waiting if request.sample == sample]:
                self._waiting.remove(found[0])
                self._ended.append(SampleEnd(sample, found[0].group, found[0].place, 0, self._version(), False))
        self._told.set()
        self._fill()

    def look(self) -> tuple[float, float, float]:
        """`busy_s`, `slot_s` and `tokens` up to now."""
        self._advance()
        return self.busy_s, self.slot_s, self.tokens

    async def under_way(self) -> Mapping[int, Begun]:
        return {}

    def _advance(self) -> None:
        """Come as far as time has."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        if (running := len(self._running)) and self._runs:
            steps = passed / self._step_s(running)
            self._progress += steps
            self.tokens += steps * running
            self.busy_s += passed
            self.slot_s += passed * running / self._slots

    def _fill(self) -> None:
        while self._begins and self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            end = self._progress + self._length(request)
            self._running[request.sample] = request, end, self._version()
            heapq.heappush(self._ends, (end, request.sample))
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
        if not self._running:
            self._drained.set()
        if self._ends and self._runs:
            left = max(0.0, self._ends[0][0] - self._progress)
            self._timer = asyncio.get_running_loop().call_later(left * self._step_s(len(self._running)), self._end)

    def _end(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._progress + 1e-6:
            _, sample = heapq.heappop(self._ends)
            if sample in self._running:
                request, _, oldest = self._running.pop(sample)
                tokens = self._length(request)
                self._ended.append(SampleEnd(sample, request.group, request.place, tokens, oldest, True))
        if self._ended:
            self._told.set()
        self._fill()
