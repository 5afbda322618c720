"""Steps of a batch call and of a stream over stand-in engines on a virtual clock, and what they made of the engines."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.response_lengths import LONGEST, Lengths
from benchmarks.stand_in_engine import StandInCache, StandInEngine
from benchmarks.virtual_clock import run
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import Request
from hybridflow.metrics import names as metrics
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.groups import StepRows
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream


@dataclass(frozen=True)
class Workload:
    """Requests to generate, and the speed of the engines.

    Args:
        engines, slots: how many there are, and requests that each runs at the same time.
        groups, samples: of a step, and responses in a group.
        task: whose published lengths responses have.
        step_s: seconds of an engine's decoding step: with no request, and of each request more.
        warm_up, steps: steps that are not measured, and those that are.
        seed: of the lengths.
        as_long_again: whether a response that was given up is as long when its prompt comes again; else it is drawn
            anew.
        cache: of each engine; without an end if None.
        dynamic_batching: whether requests in flight follow the room in it.
    """

    engines: int = 64
    slots: int = 128
    groups: int = 512
    samples: int = 8
    task: str = "math"
    step_s: tuple[float, float] = (0.006, 0.0000364)
    warm_up: int = 6
    steps: int = 18
    seed: int = 0
    as_long_again: bool = False
    cache: StandInCache | None = None
    dynamic_batching: bool = False


@dataclass(frozen=True)
class Learned:
    """A step's groups.

    Args:
        groups: numbers of their draws.
        staleness: of each group.
        tokens: of all responses.
    """

    groups: tuple[int, ...]
    staleness: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Measured:
    """Measurements of steps.

    Args:
        step_s: seconds of a step in the mean.
        busy: share of the time in which an engine has at least one request, in the mean of the engines.
        slots: share of an engine's slots that are in use, in the mean of time and engines.
        trainer: share of the time in which the trainer learns.
        tokens_per_s: of responses that were learned from.
        given_up: share of the generated tokens that no step learned from, or will.
        mean_tokens: of a response that was learned from.
        mean_staleness, most_staleness: of groups.
        evicted, dropped, carried: groups a step.
        sync_s: seconds of a step in which the trainer waits for transfers.
        pause_s, longest_pause_s: seconds of a step in which an engine cannot generate, in the mean and at the most.
        reclaimed: responses a step that were taken from engines that were leased.
        learned: of every step, those of the warm-up too.
    """

    step_s: float
    busy: float
    slots: float
    trainer: float
    tokens_per_s: float
    given_up: float
    mean_tokens: float
    mean_staleness: float
    most_staleness: int
    evicted: float
    dropped: float
    carried: float
    learned: tuple[Learned, ...] = field(repr=False)
    sync_s: float = 0.0
    pause_s: float = 0.0
    longest_pause_s: float = 0.0
    reclaimed: float = 0.0

    @property
    def stats(self) -> dict[str, Any]:
        """All but `learned`, by name."""
        return {name: value for name, value in vars(self).items() if name != "learned"}


@dataclass(frozen=True)
class Transfer:
    """Schedule of the transfers of new weights to engines.

    Args:
        wait: whether responses under way end first; else they stand still.
        at_a_time: engines that get them together; all if None.
        engine_s: seconds in which an engine can take them in.
        actor_s: seconds in which the actor can send them to one engine.
    """

    wait: bool
    at_a_time: int | None = None
    engine_s: float = 0.0
    actor_s: float = 0.0

    def seconds(self, engines: int) -> float:
        """Return the seconds of a transfer to `engines` engines."""
        return max(self.engine_s, engines * self.actor_s)


@dataclass(frozen=True)
class DeviceLease:
    """Engines on devices of the trainer, which generate while a step waits.

    Args:
        engines: how many of the workload's; the last ones.
        after_s: seconds that a step waits before.
        turn_s: seconds in which the trainer gives memory back, and the engines have theirs again.
    """

    engines: int
    after_s: float
    turn_s: float

    def of(self, workload: Workload) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(range(workload.engines - self.engines, workload.engines))


class Setup:
    """Engines of a workload, the newest version of the weights, and that which each serves."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.version = workload, 0
        self.versions = [0] * workload.engines
        self.pauses: list[float] = []
        """How long each engine could not generate, in each transfer."""
        self._lengths = Lengths(workload.task, workload.seed)
        self._known: dict[int, int] = {}
        self._tries: dict[tuple[int, int], int] = {}
        first, more = workload.step_s
        self.engines = [
            StandInEngine(
                workload.slots,
                lambda n: first + more * n,
                self._length,
                functools.partial(self.versions.__getitem__, number),
                workload.cache,
            )
            for number in range(workload.engines)
        ]

    async def new_weights(self, stream: RolloutStream | None = None, transfer: Transfer | None = None) -> None:
        """Bring the next version to all engines, as `WeightSync` does; at once, and in no time, without a transfer."""
        self.version += 1
        engines = range(len(self.engines))
        if transfer is None:
            self.versions[:] = [self.version] * len(engines)
            return
        rolling, clock = transfer.at_a_time is not None, asyncio.get_running_loop().time
        size = transfer.at_a_time or len(engines)
        chunks = [engines[first : first + size] for first in range(0, len(engines), size)]
        sending = asyncio.Lock()

        async def stand(number: int) -> float:
            began = clock()
            await self.engines[number].begin_weights(wait=transfer.wait)
            return clock() if transfer.wait else began

        async def renew(chunk: range) -> None:
            if rolling and stream is not None:
                stream.change(chunk)
            since = await asyncio.gather(*(stand(number) for number in chunk))
            async with sending:
                await asyncio.sleep(transfer.seconds(len(chunk)))
            for number in chunk:
                self.versions[number] = self.version
                self.engines[number].commit_weights()
            if rolling and stream is not None:
                stream.serve(chunk, self.version)
            self.pauses += [clock() - start for start in since]

        if transfer.wait:
            await asyncio.gather(*map(renew, chunks))
        else:
            for chunk in chunks:
                await renew(chunk)

    def _length(self, request: Request) -> int:
        if request.sample not in self._known:
            name = request.group, request.index
            again = self._tries[name] = self._tries.get(name, -1) + 1
            again = 0 if self.workload.as_long_again else again
            self._known[request.sample] = self._lengths.draw(request.group, request.index, again)
        return self._known[request.sample]

    def look(self) -> tuple[float, ...]:
        """The time, and sums over the engines of `StandInEngine.look`."""
        looks = zip(*(engine.look() for engine in self.engines), strict=True)
        return asyncio.get_running_loop().time(), *(sum(values) for values in looks)


def measure_batch(workload: Workload, train_s: float, *, ahead: bool) -> tuple[Measured, float]:
    """Steps of today's batch call: the prompts are cut into equal parts, and all responses are waited for.

    Args:
        workload: of all steps.
        train_s: seconds of training.
        ahead: whether engines respond to the next step's prompts while a step learns. They serve the new weights once
            the responses are there.

    Returns:
        The figures, and seconds of the rollout alone.
    """

    async def respond(setup: Setup, first_group: int) -> tuple[int, float]:
        began = asyncio.get_running_loop().time()
        by_engine = [
            range(
                first_group + workload.groups * engine // workload.engines,
                first_group + workload.groups * (engine + 1) // workload.engines,
            )
            for engine in range(workload.engines)
        ]
        tokens = await asyncio.gather(
            *(_all(*pair, workload.samples) for pair in zip(setup.engines, by_engine, strict=True))
        )
        return sum(tokens), asyncio.get_running_loop().time() - began

    async def learn() -> tuple[Measured, float]:
        setup, learned, looks, rollouts = Setup(workload), list[Learned](), list[tuple[float, ...]](), list[float]()
        groups = itertools.count(0, workload.groups)
        following = asyncio.ensure_future(respond(setup, next(groups)))
        for step in range(workload.warm_up + workload.steps):
            tokens, seconds = await following
            if ahead:
                following = asyncio.ensure_future(respond(setup, next(groups)))
            await asyncio.sleep(train_s)
            if ahead:
                await asyncio.wait([following])
            else:
                following = asyncio.ensure_future(respond(setup, next(groups)))
            numbers = tuple(range(step * workload.groups, (step + 1) * workload.groups))
            stale = int(ahead and step > 0)
            learned.append(Learned(numbers, (stale,) * workload.groups, tokens))
            looks.append(setup.look())
            rollouts.append(seconds)
        following.cancel()
        stats = _measurements(workload, learned, looks, train_s, {})
        return stats, sum(rollouts[workload.warm_up :]) / workload.steps

    return run(learn())[0]


async def _all(engine: StandInEngine, groups: Sequence[int], samples: int) -> int:
    """Tokens of the responses to these groups, once all are there."""
    await engine.submit(
        [
            Request(group * samples + index, (), SamplingConfig(), group, index)
            for group in groups
            for index in range(samples)
        ]
    )
    left, tokens = len(groups) * samples, 0
    while left:
        ended = await engine.ended()
        left -= len(ended.samples)
        tokens += sum(sample.tokens for sample in ended.samples)
    return tokens


async def take(
    stream: RolloutStream, version: int, leased: Sequence[int], after_s: float = 0.0, turn_s: float = 0.0
) -> StepRows:
    """The groups of the step from `version`, while these engines are leased if it waits, as `RolloutSource` has them.

    Args:
        stream: of the engines.
        version: of the weights.
        leased: the engines; none if empty.
        after_s, turn_s: as of `DeviceLease`.
    """
    taking = asyncio.ensure_future(stream.take(version))
    if leased:
        await asyncio.wait([taking], timeout=after_s)
        if not taking.done():
            await asyncio.sleep(turn_s)
            stream.lease(leased)
            await asyncio.wait([taking])
            await stream.reclaim(leased)
    return await taking


def measure_stream(
    workload: Workload,
    train_s: float,
    limits: StreamLimits,
    transfer: Transfer | None = None,
    lease: DeviceLease | None = None,
) -> Measured:
    """Steps of a stream.

    Args:
        workload: of all steps.
        train_s: seconds of training.
        limits: of the stream; `groups_per_step` is that of the workload.
        transfer: how engines get new weights; in no time, and stopped by nothing, if None.
        lease: the engines that generate only while a step waits; none if None.
    """
    leased = lease.of(workload) if lease is not None else ()
    after_s, turn_s = (lease.after_s, lease.turn_s) if lease is not None else (0.0, 0.0)

    async def learn() -> Measured:
        setup, learned, looks = Setup(workload), list[Learned](), list[tuple[float, ...]]()
        counts: dict[str, int] = {"evicted": 0, "dropped": 0, "carried": 0}
        reclaimed = 0.0
        stream, synced = start(setup, limits, leased=leased), list[float]()
        for step in range(workload.warm_up + workload.steps):
            rows = await take(stream, setup.version, leased, after_s, turn_s)
            await asyncio.sleep(train_s)
            began = asyncio.get_running_loop().time()
            await setup.new_weights(stream, transfer)
            stream.trained(setup.version)
            if step == workload.warm_up - 1:
                setup.pauses.clear()
            elif step >= workload.warm_up:
                synced.append(asyncio.get_running_loop().time() - began)
            learned.append(
                Learned(
                    tuple(row.group.number for row in rows.groups),
                    rows.taken.staleness,
                    sum(end.tokens for row in rows.groups for end in row.ended),
                )
            )
            looks.append(setup.look())
            if step >= workload.warm_up:
                counts["evicted"] += len(rows.taken.evicted)
                counts["dropped"] += len(rows.taken.dropped)
                counts["carried"] += rows.taken.carried
                reclaimed += rows.metrics[metrics.STREAM_RECLAIMED]
        stream.close()
        stats = _measurements(workload, learned, looks, train_s, counts)
        return replace(
            stats,
            sync_s=sum(synced) / workload.steps,
            pause_s=sum(setup.pauses) / workload.steps / workload.engines,
            longest_pause_s=max(setup.pauses, default=0.0),
            reclaimed=reclaimed / workload.steps,
        )

    return run(learn())[0]


def start(
    setup: Setup, limits: StreamLimits, clock: Callable[[], float] | None = None, leased: tuple[int, ...] = ()
) -> RolloutStream:
    """A stream over the engines, open."""
    workload, numbers = setup.workload, itertools.count()

    def draw(count: int) -> Iterator[tuple[int, int]]:
        return ((number, number) for number in itertools.islice(numbers, count))

    bounds = RequestBounds(workload.slots, LONGEST) if workload.dynamic_batching else None
    plan = StreamPlan(limits, workload.samples, workload.slots, workload.engines, bounds, leased)
    stream = RolloutStream(plan, setup.engines, draw, lambda _: range(0), clock or asyncio.get_running_loop().time)
    stream.open(0, [engine.stats for engine in setup.engines if engine.stats is not None])
    return stream


def _measurements(
    workload: Workload,
    learned: Sequence[Learned],
    looks: Sequence[tuple[float, ...]],
    train_s: float,
    counts: dict[str, int],
) -> Measured:
    began, busy, slots, tokens = looks[workload.warm_up - 1]
    ended, busy_, slots_, tokens_ = looks[-1]
    seconds, measured = ended - began, learned[workload.warm_up :]
    staleness = [age for step in measured for age in step.staleness]
    useful = sum(step.tokens for step in measured)
    a_step: dict[str, Any] = {name: counts.get(name, 0) / workload.steps for name in ("evicted", "dropped", "carried")}
    return Measured(
        step_s=seconds / workload.steps,
        busy=(busy_ - busy) / seconds / workload.engines,
        slots=(slots_ - slots) / seconds / workload.engines,
        trainer=train_s * workload.steps / seconds,
        tokens_per_s=useful / seconds,
        given_up=1 - useful / (tokens_ - tokens),
        mean_tokens=useful / len(staleness) / workload.samples,
        mean_staleness=sum(staleness) / len(staleness),
        most_staleness=max(staleness),
        learned=tuple(learned),
        **a_step,
    )
