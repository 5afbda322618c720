"""Responses to other prompts than those of groups: of evaluations, greedy baselines and the Python API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine3d.errors import EngineError
from engine3d.rollout.requests import Request
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.stored_rows import SampleEnd, StoredRow
from hybridflow.environments.environment import Task
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.episodes.episodes import EndedEpisode, Episodes
from hybridflow.rollout.stream.engines import StreamEngines, StreamTasks

type Share = Sequence[Request]
"""Requests of one engine."""


@dataclass(frozen=True)
class OtherRows:
    """Responses to other prompts than those of groups.

    Args:
        rows: row of each sample, in the order of the requests.
        busy: engine, begin and end of the times in which one had requests in flight.
        scores: of each sample that is an episode; empty of others.
    """

    rows: tuple[StoredRow, ...]
    busy: tuple[tuple[int, float, float], ...]
    scores: tuple[SampleScore, ...] = ()


@dataclass(slots=True, eq=False)
class _OtherCall:
    """The requests of one call, as they end."""

    unended: set[int]
    """Samples that have not ended."""
    episodes: Episodes | None = None
    """Plays its samples, if they are episodes."""
    in_flight: dict[int, dict[int, Request]] = field(default_factory=dict)
    """Requests at each engine by sample."""
    waiting: list[Request] = field(default_factory=list)
    """Requests that were to be at an engine that is lost."""
    rows: dict[int, StoredRow] = field(default_factory=dict)
    scores: dict[int, SampleScore] = field(default_factory=dict)
    """Scores of episodes."""
    errors: list[str] = field(default_factory=list)
    """Reasons why responses could not be made."""
    ends: dict[int, float] = field(default_factory=dict)
    """Time of the last end at each engine."""


class OtherRequests:
    """Requests in flight that belong to no group. Those of a lost engine are submitted to others.

    Args:
        calls: of the engines.
        tasks: of the stream.
        clock: in seconds.
    """

    def __init__(self, calls: StreamEngines, tasks: StreamTasks, clock: Callable[[], float]) -> None:
        self._calls, self._tasks, self._clock = calls, tasks, clock
        self._of_sample: dict[int, _OtherCall] = {}
        self._turns: list[Request] = []
        """Turns of episodes that are to be submitted together."""

    def __len__(self) -> int:
        return len(self._of_sample)

    @property
    def unended(self) -> int:
        """Samples that have not ended."""
        return sum(len(call.unended) for call in self._calls_in_flight())

    def __contains__(self, sample: int) -> bool:
        return sample in self._of_sample

    async def respond(self, shares: Mapping[int, Share]) -> OtherRows:
        """Submit the requests of each engine together, and wait for their responses.

        Raises:
            EngineError: an engine failed, or a response was aborted.
        """
        samples = [request.sample for share in shares.values() for request in share]

        def begin(call: _OtherCall) -> None:
            for engine, share in shares.items():
                self._submit(call, engine, share)
            self.resubmit()

        return await self._ended_call(samples, _OtherCall(set(samples)), begin)

    async def play(self, episodes: Episodes, begun: Sequence[tuple[Request, Task]]) -> OtherRows:
        """Play episodes, and wait for their ends.

        Args:
            episodes: plays them.
            begun: request of the first turn of each, and its task.

        Raises:
            EngineError: an engine failed, or a turn was aborted.
        """
        samples = [request.sample for request, _ in begun]

        def begin(_: _OtherCall) -> None:
            for request, task in begun:
                episodes.begin(request, task)

        try:
            return await self._ended_call(samples, _OtherCall(set(samples), episodes), begin)
        finally:
            episodes.forget(samples)

    async def _ended_call(
        self, samples: Sequence[int], call: _OtherCall, begin: Callable[[_OtherCall], None]
    ) -> OtherRows:
        """Begin a call, and wait until each of its samples has ended."""
        began = self._clock()
        self._of_sample |= dict.fromkeys(samples, call)
        try:
            self._tasks.raise_failure()
            begin(call)
            await self._tasks.wait_for(lambda: not call.unended)
        finally:
            for sample in samples:
                del self._of_sample[sample]
            await self._tasks.wake()
        if missing := len(samples) - len(call.rows):
            cause = f": {call.errors[0]}" if call.errors else ""
            raise EngineError(f"{missing} of {len(samples)} responses were aborted{cause}")
        busy = tuple((engine, began, end) for engine, end in call.ends.items())
        scores = tuple(call.scores[sample] for sample in samples) if call.episodes is not None else ()
        return OtherRows(tuple(call.rows[sample] for sample in samples), busy, scores)

    def ended(self, engine: int, end: SampleEnd) -> None:
        """Add the end of a response, or of a turn, which continues its episode."""
        call = self._of_sample[end.sample]
        if call.in_flight.get(engine, {}).pop(end.sample, None) is None:
            return  # it was submitted to another engine since
        call.ends[engine] = self._clock()
        if end.turn is not None:
            assert call.episodes is not None
            call.episodes.turn_ended(end.sample, engine, end.turn)
            return
        call.unended.discard(end.sample)
        if end.row is not None:
            call.rows[end.sample] = end.row
        elif end.error is not None:
            call.errors.append(end.error)

    def episode_ended(self, episode: EndedEpisode, row: StoredRow) -> None:
        """Add an episode that is over."""
        sample = episode.request.sample
        call = self._of_sample[sample]
        call.unended.discard(sample)
        call.rows[sample], call.scores[sample] = row, episode.score

    def add_turn(self, request: Request) -> None:
        """Add a turn of an episode, for the engine that has its tokens in its cache."""
        self._turns.append(request)

    def submit_turns(self) -> None:
        """Submit the turns that were added."""
        turns, self._turns = self._turns, []
        shares: dict[tuple[int, int], list[Request]] = {}
        for request in turns:
            call, engine = self._of_sample.get(request.sample), request.engine
            if call is not None and call.episodes is not None and engine is not None:
                call.episodes.sent(request.sample)
                shares.setdefault((id(call), engine), []).append(request)
        for (_, engine), share in shares.items():
            self._submit(self._of_sample[share[0].sample], engine, share)
        self.resubmit()

    def remove_engine(self, number: int) -> None:
        """Submit what was in flight at a lost engine to others, or once one is there."""
        for call in self._calls_in_flight():
            call.waiting += call.in_flight.pop(number, {}).values()
        self.resubmit()

    def resubmit(self) -> None:
        """Submit the requests that wait for an engine to those present, if there are any."""
        present = self._calls.present
        for call in self._calls_in_flight():
            if call.waiting and present:
                waiting, call.waiting = call.waiting, []
                for engine, share in zip(present, even_ranges(len(waiting), len(present)), strict=True):
                    self._submit(call, engine, waiting[share.start : share.stop])

    async def abort(self) -> None:
        """Abort all that is in flight."""
        shares = [share for call in self._calls_in_flight() for share in call.in_flight.items()]
        for call in self._calls_in_flight():
            if call.episodes is not None:  # most of which are at no engine
                call.unended.clear()
                call.errors.append("the step was abandoned")
        await asyncio.gather(*(self._calls.abort(engine, list(samples)) for engine, samples in shares if samples))
        await self._tasks.wake()

    def _calls_in_flight(self) -> list[_OtherCall]:
        return list(dict.fromkeys(self._of_sample.values()))

    def _submit(self, call: _OtherCall, engine: int, share: Share) -> None:
        if engine not in self._calls.present:
            call.waiting += share
        elif share:
            call.in_flight.setdefault(engine, {}).update({request.sample: request for request in share})
            self._calls.submit(engine, share, together=call.episodes is None)
