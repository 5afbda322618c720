"""An engine that only counts tokens: requests of one batch all come further at the rate that its size allows."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine3d.rollout.requests import EngineStats, Request, Response
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds, StoredRow

_REPORTS_EVERY_S = 2.0


@dataclass(frozen=True)
class StandInCache:
    """A KV cache. Prompts that requests have in common are held once for each.

    Args:
        tokens: that it has room for. Where they are used up, the request with the fewest tokens drawn goes back to the
            queue.
        reserve: tokens that are to be free for each running request before another begins.
        prefill_s: seconds in which one token of a prompt is computed, or of what a response had.
    """

    tokens: int
    reserve: int = 0
    prefill_s: float = 0.0


@dataclass(slots=True)
class _Running:
    request: Request
    end: float
    oldest: int
    length: int


class StandInEngine:
    """Continuous batching by a formula.

    Args:
        slots: most requests that run at the same time; others wait in their order.
        step_s: seconds of a decoding step of so many requests.
        length: tokens of the response to a request.
        version: of the weights that are served.
        cache: of its keys and values; without an end if None.
    """

    def __init__(
        self,
        slots: int,
        step_s: Callable[[int], float],
        length: Callable[[Request], int],
        version: Callable[[], int] = lambda: 0,
        cache: StandInCache | None = None,
    ) -> None:
        self._slots, self._step_s, self._length, self._version = slots, step_s, length, version
        self._cache = cache
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []
        self._progress = self._at = self._resident_tokens = self._computing_s = 0.0
        self._batch_tokens = 0.0
        self._begun: dict[int, tuple[int, int]] = {}
        """Of requests that were retracted: tokens drawn, and the oldest version."""
        self._ended: list[SampleEnd] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ended_event = asyncio.Event()
        self._drained = asyncio.Event()
        self._begins = self._runs = True
        self._stats = EngineStats(cache.tokens if cache is not None else 1)
        self._prompts: set[int] = set()
        self.busy_s = 0.0
        """For how long it had something to do."""
        self.slot_s = 0.0
        """The same, times the share of its slots that were in use."""
        self.tokens = 0.0

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self._advance()
        self._waiting.extend(requests)
        self._fill()

    async def ended(self) -> SampleEnds:
        while not self._ended:
            self._ended_event.clear()
            try:
                await asyncio.wait_for(self._ended_event.wait(), _REPORTS_EVERY_S if self._cache is not None else None)
            except TimeoutError:
                self._advance()
                break
        ended, self._ended = self._ended, []
        # Nobody reads the tokens of these samples.
        samples = [replace(end, row=StoredRow(None, 0)) if end.complete else end for end in ended]
        return SampleEnds(samples, self.stats)

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
                self._leave(sample, complete=False)
            elif waiting := [request for request in self._waiting if request.sample == sample]:
                self._waiting.remove(waiting[0])
                drawn, oldest = self._had(waiting[0])
                self._begun.pop(sample, None)
                self._ended.append(SampleEnd(sample, waiting[0].group, waiting[0].index, drawn, oldest, False))
        self._ended_event.set()
        self._fill()

    def look(self) -> tuple[float, float, float]:
        """`busy_s`, `slot_s` and `tokens` up to now."""
        self._advance()
        return self.busy_s, self.slot_s, self.tokens

    @property
    def stats(self) -> EngineStats | None:
        """Statistics of the engine; None without a cache."""
        if self._cache is None:
            return None
        return replace(
            self._stats,
            used_tokens=round(self._resident_tokens),
            queued=len(self._waiting),
            batches=round(self._progress),
            batch_tokens=round(self._batch_tokens),
        )

    async def in_flight(self) -> Mapping[int, Response]:
        """The responses in flight, with zeros for tokens and log-probs."""
        self._advance()
        responses = {}
        for sample, running in self._running.items():
            if (drawn := running.length - math.ceil(running.end - self._progress)) > 0:
                responses[sample] = _prefix(drawn, running.oldest)
        for request in self._waiting:
            drawn, oldest = self._had(request)
            if drawn:
                responses[request.sample] = _prefix(drawn, oldest)
        return responses

    def _had(self, request: Request) -> tuple[int, int]:
        """Tokens that a response that waits has, and the oldest version."""
        prefix = request.prefix
        begun = (len(prefix.token_ids), prefix.oldest_version) if prefix is not None else (0, self._version())
        return self._begun.get(request.sample, begun)

    def _advance(self) -> None:
        """Come as far as time has."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        if (running := len(self._running)) and self._runs:
            self.busy_s += passed
            self.slot_s += passed * running / self._slots
            computing = min(passed, self._computing_s)
            self._computing_s -= computing
            steps = (passed - computing) / self._step_s(running)
            self._progress += steps
            self._batch_tokens += steps * (self._resident_tokens + steps * running / 2)
            self._resident_tokens += steps * running
            self.tokens += steps * running

    def _fill(self) -> None:
        while self._begins and self._waiting and len(self._running) < self._slots and self._has_room(self._waiting[0]):
            self._begin(self._waiting.popleft())
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
        if not self._running:
            self._drained.set()
        if self._ends and self._runs:
            left = max(0.0, self._ends[0][0] - self._progress)
            if self._cache is not None and len(self._running) > 1:
                left = min(left, max(0.0, self._cache.tokens - self._resident_tokens) / len(self._running))
            left_s = self._computing_s + left * self._step_s(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(left_s, self._end)

    def _has_room(self, request: Request) -> bool:
        if self._cache is None or not self._running:
            return True
        needed = request.tokens + self._had(request)[0]
        reserved = self._cache.reserve * (len(self._running) + 1)
        return self._resident_tokens + needed + reserved < self._cache.tokens

    def _begin(self, request: Request) -> None:
        drawn, oldest = self._had(request)
        self._begun.pop(request.sample, None)
        length = self._length(request)
        end = self._progress + length - drawn
        self._running[request.sample] = _Running(request, end, oldest, length)
        self._resident_tokens += request.tokens + drawn
        heapq.heappush(self._ends, (end, request.sample))
        if self._cache is not None:
            cached = request.tokens if request.group in self._prompts else 0
            self._prompts.add(request.group)
            self._computing_s += self._cache.prefill_s * (request.tokens + drawn - cached)
            self._stats = replace(
                self._stats,
                prompt_tokens=self._stats.prompt_tokens + request.tokens + drawn,
                cached_tokens=self._stats.cached_tokens + cached,
            )

    def _end(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._progress + 1e-6:
            _, sample = heapq.heappop(self._ends)
            running = self._running.get(sample)
            if running is not None and running.end <= self._progress + 1e-6:
                self._leave(sample, complete=True)
        while self._cache is not None and self._resident_tokens >= self._cache.tokens - 1e-6 and len(self._running) > 1:
            self._retract()
        if self._ended:
            self._ended_event.set()
        self._fill()

    def _leave(self, sample: int, *, complete: bool) -> None:
        running = self._running.pop(sample)
        request, left = running.request, max(0.0, running.end - self._progress)
        self._resident_tokens -= request.tokens + running.length - left
        tokens = running.length if complete else running.length - int(left)
        self._ended.append(SampleEnd(sample, request.group, request.index, tokens, running.oldest, complete))

    def _retract(self) -> None:
        """Take the request back that has drawn the least."""
        sample = max(
            self._running,
            key=lambda candidate: (self._running[candidate].end - self._running[candidate].length, candidate),
        )
        running = self._running.pop(sample)
        drawn = running.length - (running.end - self._progress)
        self._resident_tokens -= running.request.tokens + drawn
        self._begun[sample] = int(drawn), running.oldest
        self._waiting.append(running.request)
        self._stats = replace(self._stats, retracted=self._stats.retracted + 1)


def _prefix(tokens: int, version: int) -> Response:
    return Response([0] * tokens, [0.0] * tokens, [version] * tokens)
