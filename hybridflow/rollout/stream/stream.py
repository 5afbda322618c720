"""The rollout controller: keeps engines busy, and hands groups over as they are completed.

It draws prompts while the ledger has capacity, sends each request to an engine that has capacity, sees every response
as it ends, and gives a step its groups. It knows ids, lengths and versions of samples. Their tokens stay in the object
store of the node that drew them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from engine3d.errors import EngineError
from engine3d.rollout.requests import EngineStats, Request, Response
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds
from hybridflow.environments.environment import Task
from hybridflow.metrics import names as metrics
from hybridflow.rollout.dispatch import Dispatcher
from hybridflow.rollout.dynamic_batching import DynamicBatching
from hybridflow.rollout.episodes.episodes import EndedEpisode, EpisodeSetup
from hybridflow.rollout.episodes.stream_episodes import StreamEpisodes
from hybridflow.rollout.ledger import Group, Taken
from hybridflow.rollout.other_requests import OtherRequests, OtherRows, Share
from hybridflow.rollout.stream.engines import EngineLostError, StreamEngine, StreamEngines, StreamTasks
from hybridflow.rollout.stream.events import StreamEvents
from hybridflow.rollout.stream.groups import GatheredGroup, GroupRequests, Scorer, StepRows, StreamGroups, StreamState
from hybridflow.rollout.stream.metrics import BusyTimes, StreamMetrics
from hybridflow.rollout.stream.plan import StreamPlan

_FIRST_GUESS = 256.0
"""Tokens that a response is expected to have before any has ended."""
_MOST_NAMED = 4
"""Engines that a line names."""
_REMEMBERED = 0.99
"""Weight of the responses before in the running mean of lengths."""


class RolloutStream:
    """The state of a stream, and its reactions to events.

    Args:
        plan: of it.
        engines: by number.
        draw: draws a count of further prompts: the number of each draw, and the index of its prompt.
        prompt: token ids of a prompt, by its index.
        clock: in seconds.
        scorers: that score every sample as it ends; a group is complete once all of its samples are scored.
        episodes: environments in which each sample is an episode, which gives it its score; None without.
    """

    def __init__(
        self,
        plan: StreamPlan,
        engines: Sequence[StreamEngine],
        draw: Callable[[int], Iterable[tuple[int, int]]],
        prompt: Callable[[int], Sequence[int]],
        clock: Callable[[], float] = time.monotonic,
        scorers: Sequence[Scorer] = (),
        episodes: EpisodeSetup | None = None,
    ) -> None:
        self._plan, self._clock = plan, clock
        self._dispatcher = Dispatcher(len(engines), plan.requests_per_engine, self._expected)
        for number in plan.leased:
            self._dispatcher.leave(number)
        self._tasks = StreamTasks()
        self.groups = StreamGroups(plan, draw, scorers, self._tasks)
        self.ledger = self.groups.ledger
        self._engines = StreamEngines(engines, self._tasks, self._dispatcher.has, plan.restarts, self._remove_engine)
        self._others = OtherRequests(self._engines, self._tasks, clock)
        self._episodes = StreamEpisodes(episodes, clock, self._tasks, self._others, self)
        self._requests = GroupRequests(self._dispatcher, prompt, plan.sampling, self._episodes.begin)
        self._batching: DynamicBatching | None = None
        if plan.bounds is not None:
            self._batching = DynamicBatching(plan.bounds)
        self._step_version = 0
        """Version that the last step began from."""
        self._length = _FIRST_GUESS
        self._turn = asyncio.Lock()
        """Held by requests that are submitted together, until they have ended."""
        self._abandoned = False
        """True once a step was abandoned, after which nothing is begun."""
        self._open = False
        self._busy = BusyTimes(clock)
        self.metrics = StreamMetrics(len(engines), clock)
        self.events = StreamEvents()

    # What the driver asks for

    def open(self, version: int, stats: Sequence[EngineStats] = ()) -> None:
        """Begin: engines serve this version, and their responses are collected.

        Args:
            version: of the weights.
            stats: of each engine, if they report them.
        """
        self._open = True
        self._dispatcher.serve_all(version)
        for number, engine_stats in enumerate(stats):
            self._begin_stats(number, engine_stats)
        for number in range(len(self._engines)):
            self._engines.collect(number, self._take_in)
        self._episodes.open()
        self.feed()

    def _begin_stats(self, number: int, stats: EngineStats) -> None:
        """Record the stats of an engine before anything is sent to it."""
        self.metrics.begin(number, stats)
        if self._batching is not None:
            self._dispatcher.limit(number, self._batching.begin(number, stats))

    async def take(self, version: int) -> StepRows:
        """The groups of the step from `version`; waits for them.

        Raises:
            EngineError: an engine failed.
        """
        began = self._clock()
        if self._plan.together:
            self.next_groups()
            self._send(self._dispatcher.send_shares())
        elif self.ledger.allow_step():
            self.feed()
        taken = await self._tasks.wait_for(partial(self._taken, version))
        assert taken is not None
        self._step_version = version
        self.metrics.waited(self._clock() - began)
        self._drop(taken.evicted, "evicted")
        self._drop(taken.dropped, "dropped")
        self.metrics.count("carried", taken.carried)
        self.events.took(version, taken)
        events = self.events.collect()  # what is begun from here on is of the next step
        self.groups.took(taken)
        self.metrics.took(self.groups.samples_in_training)
        busy = self._busy.take()
        if self._plan.together:
            self._admit(self._plan.limits.groups_per_step)
            self._send(self._dispatcher.send_shares())
        self.feed()
        collected = self.metrics.collect(self._dispatcher, self.ledger)
        if self.groups.scoring.needed:
            collected[metrics.STREAM_WAITING_REWARDS] = len(self.groups.scoring)
        if self._batching is not None:
            collected[metrics.STREAM_REQUEST_LIMIT] = self._dispatcher.mean_limit
        return StepRows(self.groups.training, taken, collected, busy, events)

    def next_groups(self) -> tuple[Group, ...]:
        """The groups of the next step, of those that are submitted together; drawn now unless they were before."""
        if self.ledger.groups:
            self._admit(len(self.ledger.returned))  # those that an engine has lost
        else:
            self.ledger.allow_step()
            self._admit(self._plan.limits.groups_per_step)
        return self.ledger.groups

    async def respond(self, shares: Mapping[int, Share]) -> OtherRows:
        """Responses to other prompts than those of groups; waits for them.

        Args:
            shares: for each engine its requests, which are submitted together.

        Raises:
            EngineError: an engine failed, or a response was aborted.
        """
        if not (count := sum(map(len, shares.values()))):
            return OtherRows((), ())
        async with self._turn if self._plan.together else nullcontext():
            if self._abandoned:
                raise EngineError(f"{count} responses were not begun: the step was abandoned")
            return await self._others.respond(shares)

    async def play(self, begun: Sequence[tuple[Request, Task]]) -> OtherRows:
        """Episodes of other prompts than those of groups; waits for them.

        Args:
            begun: request of the first turn of each, and its task.

        Raises:
            EngineError: an engine failed, or a turn was aborted.
        """
        if self._abandoned:
            raise EngineError(f"{len(begun)} episodes were not begun: the step was abandoned")
        return await self._episodes.play(begun)

    async def drain(self) -> None:
        """Wait for requests in flight. Raises what failed."""
        await self._tasks.wait_for(lambda: not self._dispatcher.busy)

    def waiting_for(self) -> str:
        """Work that the current step, or a call for other prompts, still waits for: one line."""
        counts = {number: self._dispatcher.in_flight(number)[0] for number in range(len(self._engines))}
        busy = [f"{count} at engine {number}" for number, count in counts.items() if count]
        if len(busy) > _MOST_NAMED:
            busy = [*busy[:_MOST_NAMED], f"{sum(counts.values())} at {len(busy)} engines in all"]
        reasons = [f"responses in flight: {', '.join(busy) or 'none'}"]
        if lost := [str(number) for number in counts if not self._dispatcher.has(number)]:
            reasons.append(f"engines that are restarted: {', '.join(lost)}")
        if self.groups.scoring.needed:
            reasons.append(f"{len(self.groups.scoring)} wait for their reward")
        if self._episodes:
            answers = len(self._episodes) - self._dispatcher.requests - self._dispatcher.waiting
            reasons.append(f"{max(answers, 0)} wait for their environment")
        have = f"the step has {self.ledger.ready} of {self._plan.limits.groups_per_step} groups"
        if len(self._others):
            have = f"{self._others.unended:,} of {len(self._others):,} responses to other prompts have not ended"
        return "; ".join([have, *reasons])

    def trained(self, version: int) -> None:
        """End the step: all engines serve this version."""
        self._dispatcher.serve_all(version)
        self.metrics.forget(self.groups.samples_in_training)
        self.groups.trained()
        self.feed()

    def change(self, engines: Iterable[int]) -> None:
        """Send nothing more to these engines: their weights are about to become those of the step that learns.

        What is on its way to one is of the weights that it served, or of newer ones. Once no engine with older weights
        is left, what is begun is as new as after the step, and as much of it.
        """
        for number in engines:
            self._dispatcher.change(number)
        if not self._dispatcher.sends_older_than(self._step_version + 1):
            self.ledger.trained()
            self.feed()

    def serve(self, engines: Iterable[int], version: int) -> None:
        """These engines serve this version, while others may serve the one before."""
        for number in engines:
            self._dispatcher.serve(number, version)
            self.events.serves(number, version)
        self.feed()

    # Engines that are started again

    def take_lost(self) -> dict[int, str]:
        """The engines that were lost since the last call, and why; `add_engine` follows once one was restarted."""
        return self._engines.take_lost()

    def remove_engine(self, number: int, cause: str) -> None:
        """Remove a lost engine, as others have seen. Raises EngineError where it may not be restarted."""
        with self._engines.losing(number):
            raise EngineLostError(f"rollout engine {number}: {cause}")

    def add_engine(self, number: int, version: int, stats: EngineStats | None = None) -> None:
        """Add a restarted engine, with nothing in flight, which serves this version."""
        self._dispatcher.add_engine(number, self._plan.requests_per_engine)
        self._dispatcher.serve(number, version)
        self.events.serves(number, version)
        if stats is not None:
            self._begin_stats(number, stats)
        self._engines.collect(number, self._take_in)
        self.feed()
        self._others.resubmit()

    def _remove_engine(self, number: int, cause: str) -> None:
        """Continue elsewhere what was in flight at a lost engine."""
        self.metrics.count("lost_engines")
        self.metrics.remove_engine(number)
        self._busy.end(number)
        self.events.lost(number, cause, self._requests.remove_engine(number))
        self.feed()
        self._others.remove_engine(number)

    # Engines on devices of the trainer

    def lease(self, engines: Iterable[int]) -> None:
        """Send requests to these engines until `reclaim`: no other process computes on their devices."""
        engines = tuple(engines)
        self.events.leased(engines)
        for number in engines:
            self._dispatcher.enter(number)
        self.feed()

    async def reclaim(self, engines: Iterable[int]) -> None:
        """Abort what is in flight at these engines, to continue later with its tokens. Returns once nothing is.

        Raises:
            EngineError: an engine failed.
        """
        engines = tuple(engines)
        for number in engines:
            self._dispatcher.leave(number)
        self.metrics.look(self._dispatcher)
        await asyncio.gather(*map(self._reclaim_from, engines))
        await self._tasks.wait_for(lambda: not any(self._dispatcher.in_flight(number)[0] for number in engines))

    async def _reclaim_from(self, number: int) -> None:
        await self._engines.submitted(number)
        prefixes = await self._engines.in_flight(number)
        if samples := self._requests.reclaim(number, prefixes):
            self.events.reclaimed(number, samples)
            self.metrics.count("reclaimed", len(samples))
            await self._engines.abort(number, samples)

    def discard_groups(self, kept: Collection[int] = ()) -> None:
        """Remove all groups but these, by number, and abort their requests."""
        self._drop(self.groups.discard(kept), "dropped")

    async def abandon(self, kept: Collection[int]) -> None:
        """Undo the draws of all groups but these, by number, and abort what is in flight of all."""
        self._abandoned = True
        self.groups.return_taken()
        self._admit(len(self.ledger.returned))
        self.discard_groups(kept)
        await self._others.abort()
        await self._tasks.wait_for(lambda: not (self._requests.are_aborted or self._others))

    def close(self) -> list[asyncio.Task[None]]:
        """Stop collecting. Returns the tasks that end with it."""
        self._open = False
        return self._tasks.cancel()

    # Over a restart

    async def state(self) -> StreamState:
        """All groups in flight, with their tokens; the stream continues meanwhile."""
        prefixes: dict[int, Response] = {}
        if self._plan.together:  # of which nobody has a part
            await self.drain()
        elif not self._episodes:  # an episode begins again, with an environment that knows nothing of it
            for number in self._engines.present:
                prefixes |= await self._engines.in_flight(number)
        self._tasks.raise_failure()
        # What ended while engines were asked is known as ended.
        prefix: Callable[[int], Response | None] = partial(self._requests.prefix, in_flight=prefixes)
        if self._episodes:
            prefix = _no_prefix
        return self.groups.state(prefix)

    def restore(self, state: StreamState) -> None:
        """Continue from `state`, before `open`."""
        for gathered in self.groups.restore(state):
            self._requests.add(gathered, state.prefixes)

    # What happens

    async def _take_in(self, number: int, ended: SampleEnds) -> None:
        """See what ends at an engine."""
        if ended.stats is not None:
            self._update_stats(number, ended.stats, [end for end in ended.samples if end.sample not in self._others])
        for end in ended.samples:
            if end.sample in self._others:
                self._others.ended(number, end)
            elif not self._dispatcher.have_ended((end.sample,)):  # else nobody waits for it any more
                self._ended(number, end)
        if ended.samples:
            self.feed()
            if not self._dispatcher.in_flight(number)[0]:
                self._busy.end(number)
            await self._tasks.wake()

    def _update_stats(self, number: int, stats: EngineStats, ended: Sequence[SampleEnd]) -> None:
        """Update the stats of an engine, with the responses that have ended."""
        self.metrics.update(number, stats)
        if self._batching is not None:
            in_flight = self._dispatcher.in_flight(number)[0]
            freed = sum(end.tokens for end in ended)
            self._dispatcher.limit(number, self._batching.update(number, stats, in_flight, len(ended), freed))
            if not ended:
                self.feed()

    def _ended(self, number: int, end: SampleEnd) -> None:
        if self._requests.ended(end) != "ended":
            return
        if not end.complete:
            group = self.groups.lose(end)
            self._drop((group,), "lost")
            self.ledger.lost(group.number)
            return
        if end.turn is not None:
            self._count_length(self._episodes.turn_ended(end.sample, number, end.turn))
            return
        self._count_length(end.tokens)
        self.metrics.ended(end.sample, end.tokens)
        gathered = self._add_end(end)
        self.groups.score(end)
        self.groups.note_if_complete(gathered)

    def _count_length(self, tokens: int) -> None:
        """Add tokens that an engine has drawn for a request to the mean of their number."""
        self._length = _REMEMBERED * self._length + (1 - _REMEMBERED) * tokens

    def _add_end(self, end: SampleEnd) -> GatheredGroup:
        """Add an ended sample to its group. Returns the group."""
        gathered = self.groups.add_end(end)
        if gathered.is_complete(scored=False):
            self._dispatcher.forget(end.group)
        return gathered

    # Episodes

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that an engine serves."""
        return self._dispatcher.newest_version

    def submit_turn(self, request: Request, continues: bool) -> None:
        """Request a turn: before all that waits where it continues an episode."""
        self._requests.submit(request, first=continues)

    def add_episode(self, end: SampleEnd, episode: EndedEpisode) -> None:
        """Add an episode that is over to its group, with its score."""
        self.groups[end.group].scores[end.index] = {"reward": episode.score}
        self.metrics.ended(end.sample, episode.drawn)
        self.groups.note_if_complete(self._add_end(end))

    def _taken(self, version: int) -> Taken | None:
        # A completed group may be older than was known.
        if evicted := self.ledger.evict(version):
            self._drop(evicted, "evicted")
            self.feed()
        if self._plan.together and self.ledger.returned:
            self.next_groups()
            self._send(self._dispatcher.send_shares())
        taken = self.ledger.take(version)
        if taken is None and not (self.ledger.in_flight or self._dispatcher.waiting or self._dispatcher.busy):
            raise EngineError(f"no group is in flight, and {self.waiting_for()}")
        return taken

    def feed(self) -> None:
        """Begin groups while there is capacity, and send requests to engines that have capacity."""
        if self._open and not self._plan.together:
            self._admit(None)
            self._send(self._dispatcher.send())

    def _admit(self, most: int | None) -> None:
        for gathered in self.groups.admit(most):
            self.events.admitted(gathered.group, gathered.samples.start)
            self._requests.add(gathered, {})

    def _send(self, requests: Iterable[tuple[int, Request]]) -> None:
        sent: dict[int, list[Request]] = {}
        for engine, request in requests:
            sent.setdefault(engine, []).append(request)
            self._episodes.sent(request.sample)
            self.ledger.sent(request.group, self._dispatcher.version(engine))
        if self._plan.together and sent:
            self._tasks.spawn(self._submit_step(sent))
        else:
            self._submit_all(sent)
        self.metrics.look(self._dispatcher)

    def _submit_all(self, sent: Mapping[int, Sequence[Request]]) -> None:
        for engine, requests in sent.items():
            self._busy.begin(engine)
            self.events.sent(engine, self._dispatcher.version(engine), [request.sample for request in requests])
            self._engines.submit(engine, requests, together=self._plan.together)

    async def _submit_step(self, sent: Mapping[int, Sequence[Request]]) -> None:
        """Submit the requests of a step together, and let no others begin until these have ended."""
        async with self._turn:
            self._submit_all(sent)
            samples = [request.sample for requests in sent.values() for request in requests]
            # The next step's may be sent as soon as these have ended.
            await self._tasks.wait_for(lambda: self._dispatcher.have_ended(samples))

    def _drop(self, groups: Iterable[Group], why: str) -> None:
        """Abort the groups returned to the queue."""
        groups = tuple(groups)
        self.events.returned(why, groups)
        for group in groups:
            gathered = self.groups.remove(group)
            self.metrics.count(why)
            self.metrics.forget(gathered.samples)
            self._episodes.forget(gathered.samples)
            for engine, samples in self._requests.drop(gathered).items():
                self.events.aborted(engine, samples)
                self._tasks.spawn(self._engines.abort(engine, samples))

    def _expected(self, prompt_tokens: int) -> float:
        return self._length


def _no_prefix(_: int) -> None:
    """Prefix of an episode in a checkpoint."""
