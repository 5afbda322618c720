"""Groups of a stream, from their draws to the step that trains on them: requests, ends and scores of their samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine3d.errors import EngineError
from engine3d.rollout.config import Sampling
from engine3d.rollout.requests import Request, Response
from hybridflow.batch.stored_rows import SampleEnd, StoredRow
from hybridflow.rollout.dispatch import Dispatcher
from hybridflow.rollout.ledger import Group, Ledger, Taken
from hybridflow.rollout.stream.plan import StreamPlan

if TYPE_CHECKING:
    # It imports Ray, which commands that read the groups of a checkpoint do without.
    from hybridflow.rollout.stream.engines import StreamTasks

_MOST_LOSSES = 3
"""Times that engines abort a response of one group of their own accord, after which the stream fails."""


@dataclass(slots=True)
class GatheredGroup:
    """The samples of a group so far: in flight, in a step, and over a restart.

    Args:
        group: the draw.
        samples: ids of its samples.
        ends: samples that have ended, by index in the group.
        scores: by index in the group.
    """

    group: Group
    samples: range
    ends: dict[int, SampleEnd] = field(default_factory=dict)
    scores: dict[int, Any] = field(default_factory=dict)

    def is_complete(self, *, scored: bool) -> bool:
        """True if all samples have ended. `scored`: and have a score."""
        count = len(self.samples)
        return len(self.ends) == count and (not scored or len(self.scores) == count)

    @property
    def ended(self) -> list[SampleEnd]:
        """Samples that have ended, in the order of the samples."""
        return [self.ends[index] for index in sorted(self.ends)]

    @property
    def rows(self) -> list[StoredRow]:
        """Rows of the samples that have ended, in the order of the samples."""
        return [end.stored_row for end in self.ended]

    @property
    def left(self) -> list[int]:
        """Ids of the samples that have not ended."""
        return [sample for index, sample in enumerate(self.samples) if index not in self.ends]

    def copy(self) -> GatheredGroup:
        """The group as it is now."""
        return replace(self, ends=dict(self.ends), scores=dict(self.scores))


@dataclass(frozen=True)
class StepRows:
    """Groups and metrics of a step.

    Args:
        groups: in the order of their draws, complete.
        taken: of them, from the ledger.
        metrics: of the stream since the last step, by name.
        busy: engine, begin and end of the times in which one had requests in flight, by the stream's clock.
        events: decisions since the last step, in order; see `StreamEvents`.
    """

    groups: tuple[GatheredGroup, ...]
    taken: Taken
    metrics: dict[str, float]
    busy: tuple[tuple[int, float, float], ...] = ()
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class StreamState:
    """All groups in flight or complete, over a restart.

    Args:
        ledger: `Ledger.state()`.
        samples_drawn: ids of samples that were given out.
        groups: by the number of their draws.
        prefixes: tokens of the samples that have not ended and have some, by id.
    """

    ledger: dict[str, Any]
    samples_drawn: int
    groups: tuple[GatheredGroup, ...]
    prefixes: Mapping[int, Response]


class Scorer(Protocol):
    """A scorer of samples, some at a time."""

    async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> Sequence[Any]:
        """The score of each sample. `prompts`: index of the prompt of each. Raises its error."""


class ScoringQueue:
    """Waiting samples, sent to scorers as soon as one may have more: a share to each idle scorer, else all of them to
    the one with the fewest batches.

    Args:
        scorers: none where nothing is scored.
        at_once: batches that each may have at a time.
        scored: called with the ends of samples, and their scores.
        spawn: starts a task.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        at_once: int,
        scored: Callable[[Sequence[SampleEnd], Sequence[Any]], Awaitable[None]],
        spawn: Callable[[Any], object],
    ) -> None:
        self._scorers, self._at_once, self._scored, self._spawn = scorers, at_once, scored, spawn
        self._batches = [0] * len(scorers)
        self._waiting: dict[int, tuple[SampleEnd, int]] = {}
        self._dealing = False
        self._being_scored = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._being_scored

    @property
    def needed(self) -> bool:
        """True if samples are scored."""
        return bool(self._scorers)

    def add(self, end: SampleEnd, prompt: int) -> None:
        """Queue a sample for scoring: a response to the prompt of this index."""
        self._waiting[end.sample] = end, prompt
        if not self._dealing:  # together with what is added at the same time
            self._dealing = True
            self._spawn(self._deal_added())

    def forget(self, sample: int) -> None:
        """Remove a sample from the queue. One that is being scored continues."""
        self._waiting.pop(sample, None)

    async def _deal_added(self) -> None:
        self._dealing = False
        self._deal()

    def _deal(self) -> None:
        fewest = min(self._batches)
        if fewest >= self._at_once:
            return
        takers = [scorer for scorer, batches in enumerate(self._batches) if batches == fewest]
        takers = takers if fewest == 0 else takers[:1]
        for left, scorer in zip(range(len(takers), 0, -1), takers, strict=True):
            if count := -(-len(self._waiting) // left):
                taken = [self._waiting.pop(sample) for sample in list(islice(self._waiting, count))]
                self._batches[scorer] += 1
                self._being_scored += count
                self._spawn(self._score(scorer, taken))

    async def _score(self, scorer: int, taken: Sequence[tuple[SampleEnd, int]]) -> None:
        rows = [end.stored_row for end, _ in taken]
        scores = await self._scorers[scorer].score(rows, [prompt for _, prompt in taken])
        self._batches[scorer] -= 1
        self._being_scored -= len(taken)
        self._deal()
        await self._scored([end for end, _ in taken], scores)


class StreamGroups:
    """All groups of a stream that no step has trained on, and the ledger's account of them.

    Args:
        plan: of the stream.
        draw: draws a count of further prompts: the number of each draw, and the index of its prompt.
        scorers: that score every sample as it ends; a group is complete once all of its samples are scored.
        tasks: of the stream.
    """

    def __init__(
        self,
        plan: StreamPlan,
        draw: Callable[[int], Iterable[tuple[int, int]]],
        scorers: Sequence[Scorer],
        tasks: StreamTasks,
    ) -> None:
        self._samples_per_prompt, self._tasks = plan.samples_per_prompt, tasks
        self.ledger = Ledger(plan.limits, draw)
        self.scoring = ScoringQueue(scorers, plan.scored_at_once, self._scored, tasks.spawn)
        self.training: tuple[GatheredGroup, ...] = ()
        """Groups that the current step trains on."""
        self.samples_drawn = 0
        """Count of sample ids that were given out."""
        self._groups: dict[int, GatheredGroup] = {}
        self._losses: Counter[int] = Counter()
        """Times that engines have aborted a response of a group of their own accord, by its number."""

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, number: int) -> GatheredGroup:
        return self._groups[number]

    def admit(self, most: int | None) -> Iterator[GatheredGroup]:
        """Begin groups while the ledger has capacity, each as it is iterated. `most`: of them; all that fit if None."""
        for group in self.ledger.admit(most):
            gathered = self._groups[group.number] = GatheredGroup(group, self._samples_from(self.samples_drawn))
            self.samples_drawn = gathered.samples.stop
            yield gathered

    def add_end(self, end: SampleEnd) -> GatheredGroup:
        """Add an ended sample to its group."""
        gathered = self._groups[end.group]
        gathered.ends[end.index] = end
        self.ledger.sent(end.group, end.oldest)  # it may have begun before a restart, with older weights
        return gathered

    def score(self, end: SampleEnd) -> None:
        """Queue an ended sample for scoring, where samples are scored."""
        if self.scoring.needed:
            self.scoring.add(end, self._groups[end.group].group.prompt)

    async def _scored(self, ends: Sequence[SampleEnd], scores: Sequence[Any]) -> None:
        """Record the scores of samples. The group of some may be gone, or begun again."""
        for end, score in zip(ends, scores, strict=True):
            gathered = self._groups.get(end.group)
            if gathered is not None and gathered.samples[end.index] == end.sample:
                gathered.scores[end.index] = score
                self.note_if_complete(gathered)
        await self._tasks.wake()

    def note_if_complete(self, gathered: GatheredGroup) -> None:
        """Offer a group to steps once nothing of it is missing."""
        if gathered.is_complete(scored=self.scoring.needed):
            oldest = min(end.oldest for end in gathered.ends.values())
            self.ledger.completed(gathered.group.number, oldest)

    def lose(self, end: SampleEnd) -> Group:
        """The group of which an engine has aborted a response for a reason of its own.

        Raises:
            EngineError: engines have aborted too many of it.
        """
        group = self._groups[end.group].group
        self._losses[group.number] += 1
        if (losses := self._losses[group.number]) == _MOST_LOSSES:
            cause = f": {end.error}" if end.error is not None else ""
            raise EngineError(f"engines aborted responses to the prompt of draw {group.number} {losses} times{cause}")
        return group

    def remove(self, group: Group) -> GatheredGroup:
        """Remove a group that was returned to the queue, and score nothing more of it."""
        gathered = self._groups.pop(group.number)
        for sample in gathered.samples:
            self.scoring.forget(sample)
        return gathered

    def discard(self, kept: Collection[int]) -> Iterable[Group]:
        """Return all groups but these, by number, to the queue."""
        return self.ledger.remove([group.number for group in self.ledger.groups if group.number not in kept])

    # A step

    def took(self, taken: Taken) -> None:
        """Give a step the groups that it has taken."""
        for group in taken.groups:
            self._losses.pop(group.number, None)
        self.training = tuple(self._groups.pop(group.number) for group in taken.groups)

    @property
    def samples_in_training(self) -> Iterator[int]:
        """Ids of the samples that the current step trains on."""
        return (sample for group in self.training for sample in group.samples)

    def trained(self) -> None:
        """End the step."""
        self.training = ()
        self.ledger.trained()

    def return_taken(self) -> None:
        """Return the groups of the current step, which will not train."""
        self._groups |= {gathered.group.number: gathered for gathered in self.training}
        self.training = ()
        self.ledger.return_taken()

    # Over a restart

    def state(self, prefix: Callable[[int], Response | None]) -> StreamState:
        """State of all groups. `prefix`: tokens of a sample that is in flight."""
        groups = tuple(self._groups[number].copy() for number in sorted(self._groups))
        prefixes = {sample: prefix(sample) for gathered in groups for sample in gathered.left}
        known = {sample: response for sample, response in prefixes.items() if response is not None}
        return StreamState(self.ledger.state(), self.samples_drawn, groups, known)

    def restore(self, state: StreamState) -> Iterator[GatheredGroup]:
        """Continue from `state`: each group as it is iterated."""
        self.samples_drawn = state.samples_drawn
        unfinished = {group.number for group in self.ledger.restore(state.ledger)}
        for saved in state.groups:
            gathered = self._groups[saved.group.number] = saved.copy()
            yield gathered
            if saved.group.number not in unfinished:
                continue
            for index, end in gathered.ends.items():
                if index not in gathered.scores:
                    self.score(end)
            drawn = [end.oldest for end in gathered.ends.values()]
            drawn += [state.prefixes[sample].oldest_version for sample in gathered.left if sample in state.prefixes]
            if drawn:
                self.ledger.sent(saved.group.number, min(drawn))
            self.note_if_complete(gathered)  # what nothing scores any more is not waited for

    def _samples_from(self, first: int) -> range:
        """Ids of the samples of a group, from its first."""
        return range(first, first + self._samples_per_prompt)


class GroupRequests:
    """Requests of samples that have not ended, and what becomes of those that are aborted.

    Args:
        dispatcher: sends them.
        prompt: token ids of a prompt, by its index.
        sampling: distribution that tokens are drawn from.
        begin: called with the first request of each episode, in place of sending it; None without episodes.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompt: Callable[[int], Sequence[int]],
        sampling: Sampling,
        begin: Callable[[Request], None] | None = None,
    ) -> None:
        self._dispatcher, self._prompt, self._sampling, self._begin = dispatcher, prompt, sampling, begin
        self._requests: dict[int, Request] = {}
        self._reclaimed: dict[int, Response | None] = {}
        """Samples that are aborted to continue at another engine, with the tokens that they have."""
        self._dropped: set[int] = set()
        """Samples of dropped groups that are aborted."""

    @property
    def are_aborted(self) -> bool:
        """True if samples of dropped groups have not ended yet."""
        return bool(self._dropped)

    def add(self, gathered: GatheredGroup, prefixes: Mapping[int, Response]) -> None:
        """Add the requests of a group. `prefixes`: tokens of samples, by id."""
        group, prompt = gathered.group, self._prompt(gathered.group.prompt)
        sampling = self._sampling.for_prompt(len(prompt))
        for index, sample in enumerate(gathered.samples):
            if index not in gathered.ends:
                prefix = prefixes.get(sample)
                request = Request(sample, prompt, sampling, group.number, index, prefix, prompt_index=group.prompt)
                if self._begin is not None:
                    self._begin(request)
                else:
                    self.submit(request)

    def submit(self, request: Request, *, first: bool = False) -> None:
        """Add a request, behind those that wait, or before them."""
        self._requests[request.sample] = request
        self._dispatcher.add(request, first=first)

    def ended(self, end: SampleEnd) -> Literal["dropped", "again", "ended"]:
        """Record the end of a request: of a dropped group, aborted and to be sent again, or ended by its engine."""
        self._dispatcher.ended(end.sample)
        request = self._requests.pop(end.sample, None)
        reclaimed = end.sample in self._reclaimed
        prefix = self._reclaimed.pop(end.sample, None)
        if end.sample in self._dropped:
            self._dropped.discard(end.sample)
            return "dropped"
        if reclaimed and not end.complete and request is not None:
            self._send_again(request, prefix)
            return "again"
        return "ended"

    def drop(self, gathered: GatheredGroup) -> dict[int, list[int]]:
        """Remove a group. Returns its samples in flight, by engine, which are to be aborted."""
        for sample in gathered.samples:
            self._requests.pop(sample, None)
        in_flight = self._dispatcher.forget(gathered.group.number)
        for samples in in_flight.values():
            self._dropped.update(samples)
        return in_flight

    def reclaim(self, engine: int, prefixes: Mapping[int, Response]) -> list[int]:
        """Mark the requests in flight at an engine, which are to be aborted and sent again. Returns their samples.

        `prefixes`: tokens of the samples.
        """
        samples = [sample for sample in self._dispatcher.samples(engine) if sample not in self._dropped]
        self._reclaimed |= {sample: prefixes.get(sample) for sample in samples}
        return samples

    def remove_engine(self, engine: int) -> list[int]:
        """Remove a lost engine, and send its requests again. Returns their samples."""
        again = []
        for request in reversed(self._dispatcher.remove_engine(engine)):
            prefix = self._reclaimed.pop(request.sample, None)
            if request.sample in self._dropped:
                self._dropped.discard(request.sample)
                continue
            self._send_again(request, prefix)
            again.append(request.sample)
        return again

    def prefix(self, sample: int, in_flight: Mapping[int, Response]) -> Response | None:
        """Tokens of a response at its engine, or those from which it waits to continue."""
        if sample in in_flight:
            return in_flight[sample]
        request = self._requests.get(sample)
        return request.prefix if request is not None else None

    def _send_again(self, request: Request, prefix: Response | None) -> None:
        """Send a response again before all that waits, from its prefix or else from that of its request."""
        self.submit(replace(request, prefix=prefix or request.prefix), first=True)
