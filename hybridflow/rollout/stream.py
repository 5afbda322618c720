"""The rollout controller: keeps engines at work, and hands groups over as they become whole.

It draws prompts while there is room for them, sends each request to an engine that has room, sees every response as it
ends, and gives a step its groups. Of samples it knows ids, lengths and versions; their tokens stay where they were
made.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError
from engine3d.rollout.requests import Response
from hybridflow.batch.stored_rows import Row
from hybridflow.batch.stream_requests import EngineLostError, SampleEnd, SampleEnds, StreamEngine, StreamRequest
from hybridflow.metrics import names as metrics
from hybridflow.rollout.dispatch import Dispatcher
from hybridflow.rollout.dynamic_batching import DynamicBatching
from hybridflow.rollout.ledger import Group, Ledger, Taken
from hybridflow.rollout.scoring_queue import Scorer, ScoringQueue
from hybridflow.rollout.stream_events import StreamEvents
from hybridflow.rollout.stream_figures import StreamFigures
from hybridflow.rollout.stream_types import GroupRows, GroupState, StepRows, StreamPlan, StreamState

_FIRST_GUESS = 256.0
"""Tokens that a response is expected to have before any has ended."""
_MOST_BUSY = 4096
"""Times in which engines were busy that are told for a step; the last ones."""
_MOST_NAMED = 4
"""Engines that a line names."""
_REMEMBERED = 0.99
"""Weight of the responses before in the running mean of lengths."""


@dataclass(slots=True)
class _Gathered:
    """The samples of a group so far."""

    group: Group
    first_sample: int
    ends: dict[int, tuple[SampleEnd, Row]] = field(default_factory=dict)
    """Samples by index in the group."""
    scores: dict[int, Any] = field(default_factory=dict)
    """Scores by index in the group."""


class RolloutStream:
    """The state of a stream, and what is to be done as things happen.

    Args:
        plan: of it.
        engines: by number.
        draw: gives so many further prompts: the number of each draw, and the index of its prompt.
        prompt_tokens: of a prompt, by its index.
        clock: in seconds.
        scorers: that score every sample as it ends; a group is whole once all of its are scored.
    """

    def __init__(
        self,
        plan: StreamPlan,
        engines: Sequence[StreamEngine],
        draw: Callable[[int], Iterable[tuple[int, int]]],
        prompt_tokens: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
        scorers: Sequence[Scorer] = (),
    ) -> None:
        self._plan, self._engines, self._prompt_tokens, self._clock = plan, list(engines), prompt_tokens, clock
        self.ledger = Ledger(plan.limits, draw)
        self._dispatcher = Dispatcher(len(engines), plan.requests_per_engine, self._expected)
        for number in plan.lent:
            self._dispatcher.leave(number)
        self._batching: DynamicBatching | None = None
        if plan.bounds is not None:
            self._batching = DynamicBatching(plan.bounds)
        self._groups: dict[int, _Gathered] = {}
        self._learning: tuple[GroupRows, ...] = ()
        self._given_up: set[int] = set()
        self._requests: dict[int, StreamRequest] = {}
        self._withdrawn: dict[int, Response | None] = {}
        """Samples that are aborted to continue at another engine, with the tokens that they have."""
        self._submitting: dict[int, set[asyncio.Task[None]]] = {}
        """Requests that may not have reached their engine yet, by its number."""
        self.samples_drawn = 0
        """Ids of samples that were given out."""
        self._step_version = 0
        """That the last step began from."""
        self._length = _FIRST_GUESS
        self._busy_since: dict[int, float] = {}
        self._busy: deque[tuple[int, float, float]] = deque(maxlen=_MOST_BUSY)
        self._changed = asyncio.Condition()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False
        self._restarts_left = plan.restarts
        self._lost: dict[int, str] = {}
        """Engines that the driver was not told of yet, and why."""
        self._lives = [0] * len(engines)
        """How often each engine was lost: what comes of one that was is not of the one that is there."""
        self._scoring = ScoringQueue(scorers, plan.scored_at_once, self._scored, self._spawn)
        self.figures = StreamFigures(len(engines), clock)
        self.events = StreamEvents()

    # What the driver asks for

    def open(self, version: int, figures: Sequence[EngineFigures] = ()) -> None:
        """Begin: engines serve this version, and what they make from here on is collected.

        Args:
            version: of the weights.
            figures: of each engine, if they tell them.
        """
        self._open = True
        self._dispatcher.serve_all(version)
        for number, each in enumerate(figures):
            self._begin_figures(number, each)
        for number in range(len(self._engines)):
            self._spawn(self._collect(number))
        self._feed()

    def _begin_figures(self, number: int, figures: EngineFigures) -> None:
        """How an engine is to which nothing was sent yet."""
        self.figures.begin(number, figures)
        if self._batching is not None:
            self._dispatcher.limit(number, self._batching.begin(number, figures))

    async def take(self, version: int) -> StepRows:
        """The groups of the step from `version`; waits for them.

        Raises:
            EngineError: an engine failed.
        """
        began = self._clock()
        async with self._changed:
            while (taken := self._taken(version)) is None:
                if not (self.ledger.under_way or self._dispatcher.waiting or self._dispatcher.busy):
                    raise EngineError(f"no group is in flight, and the step still {self.waiting_for()}")
                await self._changed.wait()
        self._step_version = version
        self.figures.waited(self._clock() - began)
        self._drop(taken.evicted, "evicted")
        self._drop(taken.dropped, "dropped")
        self.figures.count("carried", taken.carried)
        self.events.took(version, taken)
        events = self.events.collect()  # what is begun from here on is of the next step
        self._learning = tuple(self._rows(group) for group in taken.groups)
        self.figures.took(end.sample for each in self._learning for end in each.ends)
        self._feed()
        figures = self.figures.collect(self._dispatcher, self.ledger)
        if self._scoring.needed:
            figures[metrics.STREAM_WAITING_REWARDS] = len(self._scoring)
        if self._batching is not None:
            figures[metrics.STREAM_REQUEST_LIMIT] = self._dispatcher.mean_limit
        return StepRows(self._learning, taken, figures, self._take_busy(), events)

    def waiting_for(self) -> str:
        """What a step waits for that has not got its groups, in words."""
        counts = {number: self._dispatcher.in_flight(number)[0] for number in range(len(self._engines))}
        busy = [f"{count} at engine {number}" for number, count in counts.items() if count]
        if len(busy) > _MOST_NAMED:
            busy = [*busy[:_MOST_NAMED], f"{sum(counts.values())} at {len(busy)} engines in all"]
        parts = [f"responses in flight: {', '.join(busy) or 'none'}"]
        if lost := [str(number) for number in counts if not self._dispatcher.has(number)]:
            parts.append(f"engines that are started again: {', '.join(lost)}")
        if self._scoring.needed:
            parts.append(f"{len(self._scoring)} wait for their reward")
        return f"has {self.ledger.ready} of {self._plan.limits.groups_per_step} groups; {'; '.join(parts)}"

    def learned(self, version: int) -> None:
        """The step is over, and all engines serve this version."""
        self._dispatcher.serve_all(version)
        self.figures.forget(end.sample for each in self._learning for end in each.ends)
        self._learning = ()
        self.ledger.learned()
        self._feed()

    def change(self, engines: Iterable[int]) -> None:
        """Send nothing more to these engines: their weights are about to become those of the step that learns.

        What is on its way to one is of the weights that it served, or of newer ones. Once no engine with older weights
        is left, what is begun is as new as after the step, and as much of it.
        """
        for number in engines:
            self._dispatcher.change(number)
        if not self._dispatcher.sends_older_than(self._step_version + 1):
            self.ledger.learned()
            self._feed()

    def serve(self, engines: Iterable[int], version: int) -> None:
        """These engines serve this version, while others may serve the one before."""
        for number in engines:
            self._dispatcher.serve(number, version)
            self.events.serves(number, version)
        self._feed()

    # Engines that are started again

    def take_lost(self) -> dict[int, str]:
        """The engines that were lost since the last call, and why; `gain` tells of one that was started again."""
        found, self._lost = self._lost, {}
        return found

    def lose(self, number: int, cause: str) -> None:
        """An engine is gone, as somebody else has seen. Raises EngineError where it may not be started again."""
        with self._losing(number):
            raise EngineLostError(f"rollout engine {number}: {cause}")

    def gain(self, number: int, version: int, figures: EngineFigures | None = None) -> None:
        """An engine that was lost is there again, with nothing in flight, and serves this version."""
        self._dispatcher.gain(number, self._plan.requests_per_engine)
        self._dispatcher.serve(number, version)
        self.events.serves(number, version)
        if figures is not None:
            self._begin_figures(number, figures)
        self._spawn(self._collect(number))
        self._feed()

    @contextmanager
    def _losing(self, number: int) -> Iterator[None]:
        """An engine that is lost in the block is left out from there on, if it may be started again."""
        life = self._lives[number]
        try:
            yield
        except EngineLostError as error:
            if life != self._lives[number] or not self._dispatcher.has(number):
                return  # known already, by another of its calls
            if not self._restarts_left:
                raise
            self._restarts_left -= 1
            self._lose(number, str(error))

    def _lose(self, number: int, cause: str) -> None:
        """Have what was in flight at an engine go on elsewhere."""
        self._lost[number] = cause
        self._lives[number] += 1
        self.figures.count("lost_engines")
        self.figures.lose(number)
        self._idle(number)
        again = []
        for request in reversed(self._dispatcher.lose(number)):
            prefix = self._withdrawn.pop(request.sample, None)
            if request.sample in self._given_up:
                self._given_up.discard(request.sample)
                continue
            self._request_again(request, prefix)
            again.append(request.sample)
        self.events.lost(number, cause, again)
        self._feed()

    # Engines on devices of the trainer

    def lend(self, engines: Iterable[int]) -> None:
        """These engines take requests until `withdraw`: nobody else computes on their devices."""
        engines = tuple(engines)
        self.events.lent(engines)
        for number in engines:
            self._dispatcher.enter(number)
        self._feed()

    async def withdraw(self, engines: Iterable[int]) -> None:
        """Nothing is in flight at these engines when this returns: what was waits to go on, with what it has.

        Raises:
            EngineError: an engine failed.
        """
        engines = tuple(engines)
        for number in engines:
            self._dispatcher.leave(number)
        self.figures.look(self._dispatcher)
        await asyncio.gather(*map(self._withdraw_from, engines))
        async with self._changed:
            while any(self._dispatcher.in_flight(number)[0] for number in engines):
                self._raise_failure()
                await self._changed.wait()

    async def _withdraw_from(self, number: int) -> None:
        await asyncio.gather(*self._submitting.get(number, ()))  # what has not come cannot be aborted
        with self._losing(number):
            await self._abort_in_flight(number)

    async def _abort_in_flight(self, number: int) -> None:
        prefixes = await self._engines[number].in_flight()
        samples = [sample for sample in self._dispatcher.samples(number) if sample not in self._given_up]
        if not samples:
            return
        self._withdrawn |= {sample: prefixes.get(sample) for sample in samples}
        self.events.withdrawn(number, samples)
        self.figures.count("withdrawn", len(samples))
        await self._engines[number].abort(samples)

    def give_back(self) -> None:
        """The step that is under way will not learn: what it took is there again."""
        for each in self._learning:
            ends = {end.index: (end, row) for end, row in zip(each.ends, each.rows, strict=True)}
            scores = dict(enumerate(each.scores))
            self._groups[each.group.number] = _Gathered(each.group, each.ends[0].sample, ends, scores)
        self._learning = ()
        self.ledger.give_back()

    def close(self) -> None:
        """Collect nothing any more."""
        self._open = False
        for task in self._tasks:
            task.cancel()

    # Over a restart

    async def state(self) -> StreamState:
        """All groups in flight, with their tokens; the stream continues meanwhile."""
        partial: dict[int, Response] = {}
        for number, engine in enumerate(self._engines):
            if self._dispatcher.has(number):
                with self._losing(number):
                    partial |= await engine.in_flight()
        self._raise_failure()
        # What ended while engines were asked is known as ended.
        groups = [
            GroupState(
                gathered.group.number,
                gathered.first_sample,
                tuple(gathered.ends[index] for index in sorted(gathered.ends)),
                {
                    index: self._prefix(gathered.first_sample + index, partial)
                    for index in range(self._plan.samples_per_prompt)
                    if index not in gathered.ends
                },
                dict(gathered.scores),
            )
            for gathered in sorted(self._groups.values(), key=lambda each: each.group.number)
        ]
        return StreamState(self.ledger.state(), self.samples_drawn, tuple(groups))

    def _prefix(self, sample: int, partial: Mapping[int, Response]) -> Response | None:
        """Tokens of a response at its engine, or those from which it waits to continue."""
        if sample in partial:
            return partial[sample]
        request = self._requests.get(sample)
        return request.prefix if request is not None else None

    def restore(self, state: StreamState) -> None:
        """Go on where `state` was taken, before `open`."""
        self.samples_drawn = state.samples_drawn
        unfinished = {group.number for group in self.ledger.restore(state.ledger)}
        known = {
            each["number"]: Group(each["number"], each["prompt"], each["attempt"]) for each in state.ledger["groups"]
        }
        for each in state.groups:
            ends = {end.index: (end, row) for end, row in each.ended}
            gathered = _Gathered(known[each.number], each.first_sample, ends, dict(each.scores))
            self._groups[each.number] = gathered
            self._request_samples(gathered, each.prefixes)
            if each.number not in unfinished:
                continue
            for index, (end, row) in ends.items():
                if index not in gathered.scores:
                    self._score(end, row)
            drawn = [end.oldest for end, _ in each.ended]
            drawn += [prefix.oldest_version for prefix in each.prefixes.values() if prefix is not None]
            if drawn:
                self.ledger.sent(each.number, min(drawn))
            self._note_if_complete(gathered)  # what nothing scores any more is not waited for

    # What happens

    async def _collect(self, number: int) -> None:
        """See what ends at an engine, for as long as the stream is open."""
        life = self._lives[number]
        with self._losing(number):
            while self._open and life == self._lives[number]:
                ended = await self._engines[number].ended()
                if life == self._lives[number]:
                    await self._take_in(number, ended)
        await self._wake()

    async def _take_in(self, number: int, ended: SampleEnds) -> None:
        if ended.figures is not None:
            self._told(number, ended.figures, ended.samples)
        for row, end in enumerate(ended.samples):
            self._ended(end, Row(ended.rows, row))
        if ended.samples:
            self._feed()
            if not self._dispatcher.in_flight(number)[0]:
                self._idle(number)
            await self._wake()

    def _told(self, number: int, figures: EngineFigures, ended: Sequence[SampleEnd]) -> None:
        """An engine says how it is, and what has ended."""
        self.figures.told(number, figures)
        if self._batching is not None:
            flying = self._dispatcher.in_flight(number)[0]
            freed = sum(each.tokens for each in ended)
            self._dispatcher.limit(number, self._batching.told(number, figures, flying, len(ended), freed))
            if not ended:
                self._feed()

    def _ended(self, end: SampleEnd, row: Row) -> None:
        self._dispatcher.ended(end.sample)
        request = self._requests.pop(end.sample, None)
        withdrawn = end.sample in self._withdrawn
        prefix = self._withdrawn.pop(end.sample, None)
        if end.sample in self._given_up:
            self._given_up.discard(end.sample)
            return
        if withdrawn and not end.complete and request is not None:
            self._request_again(request, prefix)
            return
        gathered = self._groups[end.group]
        if not end.complete:  # for a reason of the engine's own
            self._drop((gathered.group,), "lost")
            self.ledger.lost(end.group)
            return
        self._length = _REMEMBERED * self._length + (1 - _REMEMBERED) * end.tokens
        self.figures.ended(end.sample, end.tokens)
        gathered.ends[end.index] = end, row
        self.ledger.sent(end.group, end.oldest)  # it may have begun before a restart, with older weights
        if len(gathered.ends) == self._plan.samples_per_prompt:
            self._dispatcher.forget(end.group)
        self._score(end, row)
        self._note_if_complete(gathered)

    def _score(self, end: SampleEnd, row: Row) -> None:
        if self._scoring.needed:
            self._scoring.add(end, row, self._groups[end.group].group.prompt)

    async def _scored(self, ends: Sequence[SampleEnd], scores: Sequence[Any]) -> None:
        """Samples have been scored; of some the group may be gone, or begun anew."""
        for end, score in zip(ends, scores, strict=True):
            gathered = self._groups.get(end.group)
            if gathered is not None and gathered.first_sample + end.index == end.sample:
                gathered.scores[end.index] = score
                self._note_if_complete(gathered)
        await self._wake()

    def _note_if_complete(self, gathered: _Gathered) -> None:
        count = self._plan.samples_per_prompt
        if len(gathered.ends) == count and (len(gathered.scores) == count or not self._scoring.needed):
            oldest = min(each.oldest for each, _ in gathered.ends.values())
            self.ledger.became_whole(gathered.group.number, oldest)

    def _taken(self, version: int) -> Taken | None:
        self._raise_failure()
        # What has become whole may show that it is older than was known.
        if evicted := self.ledger.evict(version):
            self._drop(evicted, "evicted")
            self._feed()
        return self.ledger.take(version)

    def _feed(self) -> None:
        """Begin groups while there is room, and send requests to engines that have room."""
        if not self._open:
            return
        for group in self.ledger.admit():
            gathered = _Gathered(group, self.samples_drawn)
            self.samples_drawn += self._plan.samples_per_prompt
            self._groups[group.number] = gathered
            self.events.admitted(group, gathered.first_sample)
            self._request_samples(gathered, {})
        sent: dict[int, list[StreamRequest]] = {}
        for engine, request in self._dispatcher.send():
            sent.setdefault(engine, []).append(request)
            self.ledger.sent(request.group, self._dispatcher.version(engine))
        for engine, requests in sent.items():
            self._busy_since.setdefault(engine, self._clock())
            self.events.sent(engine, self._dispatcher.version(engine), [request.sample for request in requests])
            submitting = self._submitting.setdefault(engine, set())
            task = self._spawn(self._submit(engine, requests))
            submitting.add(task)
            task.add_done_callback(submitting.discard)
        self.figures.look(self._dispatcher)

    async def _submit(self, engine: int, requests: Sequence[StreamRequest]) -> None:
        with self._losing(engine):
            await self._engines[engine].submit(requests)

    async def _abort(self, engine: int, samples: Sequence[int]) -> None:
        life = self._lives[engine]
        with self._losing(engine):
            await asyncio.gather(*self._submitting.get(engine, ()))  # what has not come cannot be aborted
            if life == self._lives[engine]:
                await self._engines[engine].abort(samples)

    def _idle(self, number: int) -> None:
        """An engine has nothing in flight any more."""
        if number in self._busy_since:
            self._busy.append((number, self._busy_since.pop(number), self._clock()))

    def _take_busy(self) -> tuple[tuple[int, float, float], ...]:
        """When engines had something to do since the last call."""
        now, found = self._clock(), tuple(self._busy)
        under_way = tuple((engine, since, now) for engine, since in self._busy_since.items())
        self._busy.clear()
        self._busy_since = dict.fromkeys(self._busy_since, now)
        return found + under_way

    def _request_samples(self, gathered: _Gathered, prefixes: Mapping[int, Response | None]) -> None:
        group, tokens = gathered.group, self._prompt_tokens(gathered.group.prompt)
        for index in range(self._plan.samples_per_prompt):
            if index in gathered.ends:
                continue
            sample, prefix = gathered.first_sample + index, prefixes.get(index)
            count = tokens + _tokens_of(prefix)
            self._requests[sample] = request = StreamRequest(sample, group.number, index, group.prompt, count, prefix)
            self._dispatcher.add(request)

    def _request_again(self, request: StreamRequest, prefix: Response | None) -> None:
        """Send a response again before all that waits, from its prefix or else from that of its request."""
        prefix = prefix or request.prefix
        more = _tokens_of(prefix) - _tokens_of(request.prefix)
        self._requests[request.sample] = again = replace(request, tokens=request.tokens + more, prefix=prefix)
        self._dispatcher.add(again, first=True)

    def _drop(self, groups: Iterable[Group], why: str) -> None:
        """Have nothing more of groups that went back."""
        groups = tuple(groups)
        self.events.returned(why, groups)
        for group in groups:
            gathered = self._groups.pop(group.number)
            self.figures.count(why)
            samples_of_group = range(gathered.first_sample, gathered.first_sample + self._plan.samples_per_prompt)
            self.figures.forget(samples_of_group)
            for sample in samples_of_group:
                self._requests.pop(sample, None)
                self._scoring.forget(sample)
            for engine, samples in self._dispatcher.forget(group.number).items():
                self._given_up.update(samples)
                self.events.given_up(engine, samples)
                self._spawn(self._abort(engine, samples))

    def _rows(self, group: Group) -> GroupRows:
        gathered = self._groups.pop(group.number)
        ends, rows = zip(*(gathered.ends[index] for index in range(self._plan.samples_per_prompt)), strict=True)
        return GroupRows(group, ends, rows, tuple(gathered.scores[index] for index in sorted(gathered.scores)))

    def _expected(self, prompt_tokens: int) -> float:
        return self._length

    # Failures

    def _spawn(self, action: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failure = self._failure or (error if isinstance(error, Exception) else EngineError(str(error)))
        wake = asyncio.get_running_loop().create_task(self._wake())
        self._tasks.add(wake)
        wake.add_done_callback(self._tasks.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _tokens_of(prefix: Response | None) -> int:
    return 0 if prefix is None else len(prefix.token_ids)
