"""The controller against engines that only count tokens, on a clock that jumps."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.stand_in_engine import StandInEngine
from benchmarks.stream_load import take
from benchmarks.virtual_clock import run
from engine3d.errors import EngineError
from engine3d.rollout import Response, SamplingConfig
from engine3d.rollout.requests import Request
from hybridflow.batch.stored_rows import SampleEnds, StoredRow
from hybridflow.rollout.ledger import Queue, StreamLimits
from hybridflow.rollout.stream.engines import EngineLostError
from hybridflow.rollout.stream.groups import StepRows, StreamState
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream

SAMPLES = 2


class _Named(StandInEngine):
    """Samples whose rows are their ids."""

    async def ended(self) -> SampleEnds:
        samples = (await super().ended()).samples
        return SampleEnds([replace(end, row=StoredRow([end.sample], 0)) if end.complete else end for end in samples])


class _Scorer:
    """Gives a sample its id, after some time, and counts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.scored: list[int] = []
        self.most = 0

    async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> list[int]:
        assert len(prompts) == len(rows)
        await asyncio.sleep(self._seconds)
        samples = [row.packed[row.index] for row in rows]
        self.scored += samples
        self.most = max(self.most, len(samples))
        return samples


class _Setup:
    """A stream with stand-in engines and a version that counts steps."""

    def __init__(
        self,
        limits: StreamLimits,
        *,
        engines: int = 2,
        slots: int = 4,
        seed: int = 0,
        scorers: Sequence[_Scorer] = (),
        leased: tuple[int, ...] = (),
        kind: type[_Named] = _Named,
        restarts: int = 0,
        scored_at_once: int = 1,
        together: bool = False,
    ) -> None:
        self._scorers = scorers
        self.version = self.drawn = 0
        chance = random.Random(seed)
        self.lengths: dict[tuple[int, int], int] = {}

        def length(request: Request) -> int:
            return self.lengths.setdefault((request.group, request.index), min(200, int(chance.paretovariate(1.2) * 5)))

        self.engines: list[Any] = [
            kind(slots, lambda n: 0.01 + 0.001 * n, length, lambda: self.version) for _ in range(engines)
        ]
        self._numbers = itertools.count()
        self.plan = StreamPlan(
            limits,
            SAMPLES,
            slots,
            engines,
            leased=leased,
            restarts=restarts,
            scored_at_once=scored_at_once,
            together=together,
        )
        self.stream = self.another()

    def another(self) -> RolloutStream:
        clock = asyncio.get_running_loop().time
        return RolloutStream(
            self.plan, self.engines, self._draw, lambda prompt: range(3 + prompt), clock, scorers=self._scorers
        )

    def _draw(self, count: int) -> Iterator[tuple[int, int]]:
        self.drawn += count
        return ((number, number % 5) for number in itertools.islice(self._numbers, count))

    def restart(self, drawn: int, version: int) -> None:
        """Be where so many prompts had been drawn, and engines served this version."""
        self.drawn, self.version, self._numbers = drawn, version, itertools.count(drawn)

    async def step(self, train_s: float = 0.5) -> StepRows:
        rows = await take(self.stream, self.version, self.plan.leased)
        assert not any(self.stream._dispatcher.in_flight(engine)[0] for engine in self.plan.leased)
        await asyncio.sleep(train_s)
        self.version += 1
        self.stream.trained(self.version)
        return rows


def _check(rows: StepRows, groups: int, staleness: int) -> None:
    assert len(rows.groups) == groups
    for group in rows.groups:
        assert [end.index for end in group.ended] == list(range(SAMPLES))
        assert {end.group for end in group.ended} == {group.group.number}
        for end, row in zip(group.ended, group.rows, strict=True):
            assert row.packed[row.index] == end.sample and end.complete
    assert max(rows.taken.staleness) <= staleness


class _Slow(_Named):
    """To which requests need longer than their aborts."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.came: set[int] = set()
        self.early: list[int] = []
        self.aborted = 0

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        await asyncio.sleep(0.001)
        self.came |= {request.sample for request in requests}
        await super().submit(requests, together=together)

    async def abort(self, samples: Sequence[int]) -> None:
        await asyncio.sleep(0.0005)
        self.early += [sample for sample in samples if sample not in self.came]
        self.aborted += len(samples)
        await super().abort(samples)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_given_up_on_its_way_to_an_engine_is_given_up_there(staleness: int) -> None:
    async def learn() -> list[_Slow]:
        setup = _Setup(StreamLimits(8, staleness, extra=4), engines=2, slots=3, kind=_Slow)
        setup.stream.open(0)
        for _ in range(30):
            await setup.step()
        return setup.engines

    engines, _ = run(learn())
    assert sum(engine.aborted for engine in engines) > 20
    assert [engine.early for engine in engines] == [[], []]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_prompt_is_learned_from_once_and_sample_ids_are_never_used_again(staleness: int) -> None:
    async def learn() -> list[StepRows]:
        setup = _Setup(StreamLimits(4, staleness))
        setup.stream.open(0)
        return [await setup.step() for _ in range(20)]

    steps, _ = run(learn())
    for rows in steps:
        _check(rows, 4, staleness)
    groups = [group.group.number for rows in steps for group in rows.groups]
    samples = [end.sample for rows in steps for group in rows.groups for end in group.ended]
    assert len(set(groups)) == len(groups) and len(set(samples)) == len(samples)
    if not staleness:
        assert groups == list(range(80))


@pytest.mark.slow
def test_running_ahead_takes_less_time_and_keeps_engines_busy() -> None:
    async def learn(limits: StreamLimits) -> tuple[float, float]:
        setup = _Setup(limits, engines=4, slots=8)
        setup.stream.open(0)
        for _ in range(30):
            await setup.step(train_s=0.2)
        now = asyncio.get_running_loop().time()
        return now, sum(engine.busy_s for engine in setup.engines) / 4 / now

    (synchronous, idle), _ = run(learn(StreamLimits(16, 0)))
    (ahead, busy), _ = run(learn(StreamLimits(16, 8)))
    assert ahead < 0.5 * synchronous
    assert busy > 0.9 > 0.6 > idle


def test_a_step_takes_the_first_of_more_than_it_needs_and_the_rest_is_aborted() -> None:
    async def learn() -> list[StepRows]:
        setup = _Setup(StreamLimits(4, 0, extra=2))
        setup.stream.open(0)
        steps = [await setup.step() for _ in range(10)]
        await asyncio.sleep(100)
        assert all(setup.stream._dispatcher.in_flight(engine)[0] <= 6 * SAMPLES for engine in range(2))
        return steps

    steps, _ = run(learn())
    for rows in steps:
        _check(rows, 4, 0)
        assert len(rows.taken.dropped) == 2
    assert steps[1].metrics["stream/dropped_groups"] == 2
    again = [group.group for rows in steps for group in rows.groups if group.group.attempt]
    assert again
    groups = [group.group.number for rows in steps for group in rows.groups]
    assert len(set(groups)) == len(groups)


def _check_tokens(stream: RolloutStream) -> None:
    """A request counts its prompt and what its response has: some have begun."""
    requests = stream._requests._requests.values()
    for request in requests:
        assert request.tokens == 3 + request.prompt_index + (
            len(request.prefix.token_ids) if request.prefix is not None else 0
        )
    assert any(request.prefix is not None for request in requests)


def test_a_stream_goes_on_where_its_state_was_taken() -> None:
    async def learn() -> tuple[list[StepRows], StreamState]:
        setup = _Setup(StreamLimits(4, 2, queue="freshest_first"))
        setup.stream.open(0)
        steps = [await setup.step() for _ in range(7)]
        await asyncio.sleep(0.1)
        state = await setup.stream.state()
        setup.stream.close()
        setup.engines = [StandInEngine(4, lambda n: 0.01, lambda _: 7, lambda: setup.version) for _ in range(2)]
        setup.stream = setup.another()
        setup.stream.restore(state)
        assert (await setup.stream.state()).ledger == state.ledger
        _check_tokens(setup.stream)
        setup.stream.open(setup.version)
        steps += [await setup.step() for _ in range(9)]
        return steps, state

    steps, state = run(learn())[0]
    groups = [group.group.number for rows in steps for group in rows.groups]
    samples = [end.sample for rows in steps for group in rows.groups for end in group.ended]
    assert len(set(groups)) == len(groups) and len(set(samples)) == len(samples)
    assert any(group.ended and len(group.ended) < SAMPLES for group in state.groups) or any(
        len(group.ended) == SAMPLES for group in state.groups
    )
    buffered = {group["number"] for group in state.ledger["groups"]}
    assert buffered <= set(groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "seed", "scored"),
    [
        (StreamLimits(4, 3, queue="freshest_first"), 0, False),
        (StreamLimits(4, 1, extra=2), 1, True),
        (StreamLimits(4, 2, extra=2, excess="carry", late="evict"), 2, True),
    ],
)
def test_thirty_kills_lose_and_repeat_nothing(limits: StreamLimits, seed: int, *, scored: bool) -> None:
    """The state is saved after each second step, and a run that is killed goes on after the last one."""
    steps_wanted, chance = 100, random.Random(seed)
    trained: dict[int, list[int]] = {}
    saved: tuple[bytes, int, int] | None = None
    kills = 0

    async def learn(setup: _Setup, done: int) -> None:
        nonlocal saved
        setup.stream.open(setup.version)
        for step in range(done + 1, steps_wanted + 1):
            rows = await setup.step()
            trained[step] = [group.group.number for group in rows.groups]
            if step % 2 == 0:
                state = await setup.stream.state()
                saved = pickle.dumps(state), step, setup.drawn

    async def attempt(limit_s: float | None) -> bool:
        setup = _Setup(limits, engines=2, slots=4, seed=seed, scorers=[_Scorer(0.02)] if scored else [])
        done = 0
        if saved is not None:
            state, done, drawn = pickle.loads(saved[0]), saved[1], saved[2]
            setup.restart(drawn, version=done)
            setup.stream.restore(state)
        setup.stream.ledger.draws_left = 4 * steps_wanted - setup.drawn
        try:
            await asyncio.wait_for(learn(setup, done), limit_s)
        except TimeoutError:
            return False
        return True

    while kills < 30:
        assert not run(attempt(chance.uniform(0.1, 3.0)))[0]
        kills += 1
    assert saved is not None and 0 < saved[1] < steps_wanted
    assert run(attempt(None))[0]
    every = [number for step in range(1, steps_wanted + 1) for number in trained[step]]
    assert sorted(every) == list(range(4 * steps_wanted))


def test_what_a_step_took_that_does_not_learn_is_there_again() -> None:
    async def learn() -> tuple[StepRows, StepRows]:
        setup = _Setup(StreamLimits(4, 1))
        setup.stream.open(0)
        first = await setup.stream.take(0)
        setup.stream.groups.return_taken()
        return first, await setup.stream.take(0)

    first, second = run(learn())[0]
    assert first.groups == second.groups


class _Rolling(_Setup):
    """Engines with a version each, that get new weights one after another."""

    def __init__(self, limits: StreamLimits, *, wait: bool, transfer_s: float = 0.3, **sizes: Any) -> None:
        super().__init__(limits, **sizes)
        self._wait, self._transfer_s = wait, transfer_s
        self.versions = [0] * len(self.engines)
        self.sent: list[tuple[int, int, int, bool]] = []
        """Group, engine, its version, and whether others had another one, of each request."""
        for number, engine in enumerate(self.engines):
            engine._step_s = lambda n: 0.05 + 0.005 * n  # so that there is something to do when weights change
            engine._version = functools.partial(self.versions.__getitem__, number)
            engine.submit = functools.partial(self._submit, number, engine.submit)  # type: ignore[method-assign]

    async def _submit(self, number: int, submit: Any, requests: Sequence[Request], *, together: bool) -> None:
        mixed = len(set(self.versions)) > 1
        self.sent += [(request.group, number, self.versions[number], mixed) for request in requests]
        await submit(requests, together=together)

    async def step(self, train_s: float = 0.5) -> StepRows:
        rows = await self.stream.take(self.version)
        await asyncio.sleep(train_s)
        self.version += 1
        transfer = asyncio.Lock()

        async def renew(number: int) -> None:
            self.stream.change([number])
            await asyncio.sleep(0)  # what is on its way to the engine arrives
            await self.engines[number].begin_weights(wait=self._wait)
            async with transfer:
                await asyncio.sleep(self._transfer_s)
            self.versions[number] = self.version
            self.engines[number].commit_weights()
            self.stream.serve([number], self.version)

        renewals = [renew(number) for number in range(len(self.engines))]
        if self._wait:  # all come to their end, each has its transfer when it has
            await asyncio.gather(*renewals)
        else:
            for renewal in renewals:
                await renewal
        self.stream.trained(self.version)
        return rows


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "limits",
    [
        StreamLimits(8, 1),
        StreamLimits(8, 3, queue="freshest_first"),
        StreamLimits(8, 1, extra=4, late="evict"),
        StreamLimits(8, 2, extra=4, excess="carry", late="evict"),
    ],
)
def test_engines_of_two_versions_make_nothing_that_is_too_old(limits: StreamLimits, wait: bool) -> None:
    async def learn() -> tuple[list[tuple[int, StepRows]], list[tuple[int, int, int, bool]]]:
        setup = _Rolling(limits, wait=wait, engines=3, slots=6)
        setup.stream.open(0)
        return [(setup.version, await setup.step()) for _ in range(40)], setup.sent

    steps, sent = run(learn())[0]
    for serving, rows in steps:
        _check(rows, 8, limits.max_staleness)
        if limits == StreamLimits(8, 1):  # no more was begun than steps can learn from
            assert rows.metrics["stream/evicted_groups"] == 0
        for group, staleness in zip(rows.groups, rows.taken.staleness, strict=True):
            drawn = min(end.oldest for end in group.ended)
            assert staleness == serving - drawn and 0 <= staleness <= limits.max_staleness
    groups = [group.group.number for _, rows in steps for group in rows.groups]
    assert len(set(groups)) == len(groups)
    assert len({engine for _, engine, _, others in sent if others}) > 1  # also while their versions differed


def test_nothing_is_sent_to_an_engine_whose_weights_change() -> None:
    async def learn() -> int:
        setup = _Rolling(StreamLimits(4, 2), wait=True, slots=2)
        for number, engine in enumerate(setup.engines):

            async def submit(
                requests: Sequence[Request], *, together: bool, number: int = number, send: Any = engine.submit
            ) -> None:
                assert setup.engines[number]._begins  # what is sent before `change` arrives before it too
                await send(requests, together=together)

            engine.submit = submit  # type: ignore[method-assign]
        setup.stream.open(0)
        for _ in range(20):
            await setup.step()
        return sum(others for *_, others in setup.sent)

    assert run(learn())[0]  # and to the other, that is not


def test_a_request_on_its_way_to_an_engine_that_changes_counts_as_the_older() -> None:
    async def learn() -> tuple[int | None, int | None]:
        setup = _Rolling(StreamLimits(1, 2), wait=False, engines=1, slots=8)
        setup.stream.open(0)  # sends to the engine, of version 0
        setup.stream.change([0])
        await setup.engines[0].begin_weights(wait=False)
        await asyncio.sleep(0.1)  # the request arrives, and is begun with the new weights
        entry = setup.stream.ledger._entries[0]
        sent = entry.oldest
        setup.versions[0] = 1
        setup.engines[0].commit_weights()
        setup.stream.serve([0], 1)
        async with asyncio.timeout(1e5):  # virtual seconds
            while entry.order is None:
                await asyncio.sleep(0.1)
        return sent, entry.oldest

    assert run(learn())[0] == (0, 1)


def test_a_step_tells_when_each_engine_was_at_work() -> None:
    async def learn() -> tuple[list[StepRows], float, list[float]]:
        setup = _Setup(StreamLimits(4, 0))
        setup.stream.open(0)
        steps = [await setup.step() for _ in range(5)]
        return steps, asyncio.get_running_loop().time(), [engine.busy_s for engine in setup.engines]

    steps, now, busy = run(learn())[0]
    for number, expected in enumerate(busy):
        times = [(begin, end) for rows in steps for engine, begin, end in rows.busy if engine == number]
        assert all(0 <= begin <= end <= now for begin, end in times)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
        assert sum(end - begin for begin, end in times) == pytest.approx(expected, rel=0.02)


def test_an_engine_that_fails_ends_the_wait_for_groups() -> None:
    class Failing(StandInEngine):
        async def ended(self) -> SampleEnds:
            await asyncio.sleep(0.05)
            raise EngineError("rollout engine died: no more memory")

    async def learn() -> None:
        setup = _Setup(StreamLimits(4, 1))
        setup.engines[1] = Failing(4, lambda n: 0.01, lambda _: 700)
        setup.stream = setup.another()
        setup.stream.open(0)
        with pytest.raises(EngineError, match="no more memory"):
            await setup.stream.take(0)

    run(learn())


@pytest.mark.parametrize(
    ("train_s", "queue"), [(20.0, "oldest_first"), (20.0, "freshest_first"), (0.01, "oldest_first")]
)
def test_whoever_is_slower_bounds_the_other(train_s: float, queue: Queue) -> None:
    """A trainer that takes ten times as long as the responses to its groups, or a tenth."""

    async def learn() -> list[StepRows]:
        setup = _Setup(StreamLimits(4, 2, queue=queue))
        setup.stream.open(0)
        steps = []
        for _ in range(12):
            rows = await setup.step(train_s)
            steps.append(rows)
            assert setup.stream.ledger.ready + setup.stream.ledger.in_flight <= 3 * 4
        return steps

    steps, _ = run(learn())
    for rows in steps:
        _check(rows, 4, 2)
    groups = [group.group.number for rows in steps for group in rows.groups]
    assert len(set(groups)) == len(groups)
    waits = [rows.metrics["stream/trainer_wait_share"] for rows in steps[4:]]
    busy = [rows.metrics["stream/engines_busy_share"] for rows in steps[4:]]
    if train_s > 1:  # the queue is full, engines stand still, and nobody waits
        assert max(waits) < 0.01 and max(busy) < 0.3
        assert {rows.metrics["stream/ready_groups"] for rows in steps[4:]} == {4}
    else:
        assert sum(waits) / len(waits) > 0.3 and sum(busy) / len(busy) > 0.7


def test_a_response_that_is_never_scored_keeps_no_other_group_back() -> None:
    class Stuck(_Scorer):
        async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> list[int]:
            if any(row.packed[row.index] == 5 for row in rows):  # of the third group
                await asyncio.sleep(1e6)
            return await super().score(rows, prompts)

    async def learn() -> list[StepRows]:
        setup = _Setup(StreamLimits(4, 1, late="evict"), scorers=[Stuck(0.05), Stuck(0.05)])
        setup.stream.open(0)
        return [await setup.step() for _ in range(8)]

    steps, _ = run(learn())
    groups = [group.group for rows in steps for group in rows.groups]
    assert [len(rows.groups) for rows in steps] == [4] * 8
    assert next(group.attempt for group in groups if group.number == 2) == 1  # drawn again once it was too old


def test_a_slow_score_keeps_no_other_group_back_where_several_batches_are_scored_at_once() -> None:
    class Slow(_Scorer):
        async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> list[int]:
            await asyncio.sleep(
                1000.0 if any(row.packed[row.index] == 5 for row in rows) else 0.0
            )  # of the third group
            return await super().score(rows, prompts)

    async def learn(scored_at_once: int) -> tuple[float, int]:
        setup = _Setup(StreamLimits(4, 2), scorers=[Slow(0.05)], scored_at_once=scored_at_once)
        setup.stream.open(0)
        started = asyncio.get_running_loop().time()
        rows = await setup.step()
        return asyncio.get_running_loop().time() - started, len(rows.groups)

    (together_s, groups), _ = run(learn(1))
    assert together_s > 1000 and groups == 4
    (apart_s, groups), _ = run(learn(2))
    assert apart_s < 10 and groups == 4


@pytest.mark.parametrize("scored_at_once", [1, 3])
def test_each_sample_is_scored_once_and_its_group_waits_for_that(scored_at_once: int) -> None:
    scorers = [_Scorer(0.2), _Scorer(0.3)]

    async def learn() -> list[StepRows]:
        setup = _Setup(StreamLimits(4, 1, extra=2), scorers=scorers, scored_at_once=scored_at_once)
        setup.stream.open(0)
        return [await setup.step() for _ in range(20)]

    steps, _ = run(learn())
    for rows in steps:
        _check(rows, 4, 1)
        for group in rows.groups:
            assert group.scores == {end.index: end.sample for end in group.ended}
    assert sum(len(rows.taken.dropped) for rows in steps)
    every = [sample for scorer in scorers for sample in scorer.scored]
    assert len(set(every)) == len(every) and all(scorer.scored for scorer in scorers)
    assert max(scorer.most for scorer in scorers) > 1  # what ends while one is at work waits together


def test_what_was_scored_before_a_restart_is_not_scored_again() -> None:
    async def learn() -> tuple[list[int], list[int], StreamState]:
        before, after = _Scorer(0.3), _Scorer(0.05)
        setup = _Setup(StreamLimits(4, 2), scorers=[before])
        setup.stream.open(0)
        for _ in range(3):
            await setup.step(0.2)
        await asyncio.sleep(0.15)
        state = await setup.stream.state()
        setup.stream.close()
        setup._scorers = [after]
        setup.engines = [_Named(4, lambda n: 0.01, lambda _: 7, lambda: setup.version) for _ in range(2)]
        setup.stream = setup.another()
        setup.stream.restore(state)
        setup.stream.open(setup.version)
        for _ in range(5):
            rows = await setup.step()
            assert all(group.scores == {end.index: end.sample for end in group.ended} for group in rows.groups)
        return before.scored, after.scored, state

    before, after, state = run(learn())[0]
    kept = [group.samples[index] for group in state.groups for index in group.scores]
    unscored = [end.sample for group in state.groups for end in group.ended if end.index not in group.scores]
    assert kept and unscored
    assert set(kept) <= set(before) and not set(kept) & set(after) and set(unscored) <= set(after)


def test_what_was_not_scored_before_a_restart_is_not_waited_for_where_nothing_scores_any_more() -> None:
    async def learn() -> tuple[StreamState, list[StepRows]]:
        setup = _Setup(StreamLimits(4, 2), scorers=[_Scorer(1000.0)])
        setup.stream.open(0)
        await asyncio.sleep(100)
        state = await setup.stream.state()
        setup.stream.close()
        setup._scorers = []
        setup.engines = [_Named(4, lambda n: 0.01, lambda _: 7, lambda: setup.version) for _ in range(2)]
        setup.stream = setup.another()
        setup.stream.restore(state)
        setup.stream.open(setup.version)
        return state, [await setup.step() for _ in range(4)]

    state, steps = run(learn())[0]
    unscored = {group.group.number for group in state.groups if len(group.ended) == SAMPLES}
    assert unscored and unscored <= {group.group.number for rows in steps for group in rows.groups}


def test_a_score_that_cannot_be_made_ends_the_wait_for_groups() -> None:
    class Failing(_Scorer):
        async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> list[int]:
            await asyncio.sleep(0.05)
            raise EngineError("reward 'judge' is gone")

    async def learn() -> None:
        setup = _Setup(StreamLimits(4, 1), scorers=[Failing(0.0)])
        setup.stream.open(0)
        with pytest.raises(EngineError, match="'judge' is gone"):
            await setup.stream.take(0)

    run(learn())


def test_a_step_says_what_it_waits_for() -> None:
    async def learn() -> tuple[str, str]:
        setup = _Setup(StreamLimits(4, 0), scorers=[_Scorer(1000.0)])
        setup.stream.open(0)
        step = asyncio.create_task(setup.stream.take(0))
        await asyncio.sleep(0.01)
        first = setup.stream.waiting_for()
        await asyncio.sleep(100)
        second = setup.stream.waiting_for()
        step.cancel()
        return first, second

    first, second = run(learn())[0]
    assert first == (
        "the step has 0 of 4 groups; responses in flight: 4 at engine 0, 4 at engine 1; 0 wait for their reward"
    )
    assert second == "the step has 0 of 4 groups; responses in flight: none; 8 wait for their reward"


def test_prompts_go_to_engines_that_have_room_as_responses_end() -> None:
    async def learn() -> Sequence[int]:
        setup = _Setup(StreamLimits(32, 0), engines=2, slots=4)
        setup.engines[0]._step_s = lambda _: 0.1  # ten times slower than the other
        setup.stream.open(0)
        await setup.stream.take(0)
        return [round(engine.tokens) for engine in setup.engines]

    slow, fast = run(learn())[0]
    assert fast > 4 * slow


@pytest.mark.parametrize("leased", [(1,), (0, 1)])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_reclaimed_engine_has_no_requests_while_a_step_learns_and_they_continue(
    staleness: int, leased: tuple[int, ...]
) -> None:
    async def learn() -> tuple[list[StepRows], _Setup]:
        setup = _Setup(StreamLimits(4, staleness), leased=leased, slots=3)
        setup.stream.open(0)
        steps = [await setup.step(train_s=0.2) for _ in range(20)]
        await asyncio.sleep(100)
        return steps, setup

    (steps, setup), _ = run(learn())
    reclaimed = sum(rows.metrics["stream/reclaimed_requests"] for rows in steps)
    for rows in steps:
        _check(rows, 4, staleness)
        assert 0 <= rows.metrics["stream/engines_busy_share"] <= 1
    groups = {group.group.number for rows in steps for group in rows.groups}
    assert len(groups) == 80
    samples = [end.sample for rows in steps for group in rows.groups for end in group.ended]
    assert len(set(samples)) == len(samples)
    assert all(setup.engines[engine].busy_s > 0 for engine in leased)
    if not staleness:
        assert reclaimed == 0  # nothing is under way once a step has its groups
        return
    assert reclaimed > 10
    # What was reclaimed is not drawn again: all tokens are of responses that were learned from, or go on.
    trained = sum(end.tokens for rows in steps for group in rows.groups for end in group.ended)
    left = sum(length for (group, _), length in setup.lengths.items() if group not in groups)
    assert trained <= sum(engine.tokens for engine in setup.engines) <= trained + left + reclaimed


def test_reclaimed_requests_that_wait_are_in_the_state() -> None:
    async def learn() -> tuple[dict[int, int], list[StepRows]]:
        setup = _Setup(StreamLimits(4, 2), leased=(0, 1), slots=3)
        setup.stream.open(0)
        for _ in range(6):
            await setup.step()
        _check_tokens(setup.stream)
        state = pickle.loads(pickle.dumps(await setup.stream.state()))
        has = {sample: len(prefix.token_ids) for sample, prefix in state.prefixes.items()}
        setup.stream.close()
        setup.stream = setup.another()
        setup.stream.restore(state)
        setup.stream.open(setup.version)
        return has, [await setup.step() for _ in range(5)]

    (has, steps), _ = run(learn())
    assert has and all(has.values())
    ended = {end.sample: end for rows in steps for group in rows.groups for end in group.ended}
    assert set(has) & set(ended)
    assert all(ended[sample].tokens >= tokens for sample, tokens in has.items() if sample in ended)
    for rows in steps:
        _check(rows, 4, 2)


class _Mortal(_Named):
    """Dies at a time, in all that it is at: what it had is lost with it."""

    dies_at = math.inf

    async def ended(self) -> SampleEnds:
        loop = asyncio.get_running_loop()
        ending = asyncio.ensure_future(super().ended())
        await asyncio.wait([ending], timeout=max(0.0, self.dies_at - loop.time()) if self.dies_at < 1e9 else None)
        self._check()
        return await ending

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self._check()
        await super().submit(requests, together=together)

    async def abort(self, samples: Sequence[int]) -> None:
        self._check()
        await super().abort(samples)

    async def in_flight(self) -> Mapping[int, Response]:
        self._check()
        return await super().in_flight()

    def _check(self) -> None:
        if asyncio.get_running_loop().time() >= self.dies_at:
            raise EngineLostError("rollout engine died: no more memory")

    def restart(self) -> None:
        """Be as if just started."""
        self.dies_at = math.inf
        self._running.clear()
        self._waiting.clear()
        self._ended.clear()
        self._resident_tokens = 0.0
        self._ended_event = asyncio.Event()  # who waits for ends of the dead one gets none of the new one


@pytest.mark.parametrize("engines", [1, 3])
def test_an_engine_that_is_lost_is_started_again_and_what_it_had_is_made_elsewhere(engines: int) -> None:
    async def learn() -> tuple[list[StepRows], _Setup]:
        setup = _Setup(StreamLimits(4, 2, extra=1), engines=engines, slots=4, kind=_Mortal, restarts=4)
        loop = asyncio.get_running_loop()

        async def recover() -> None:
            """Restart lost engines, as the driver does."""
            while True:
                await asyncio.sleep(0.05)
                for number, cause in setup.stream.take_lost().items():
                    assert cause == "rollout engine died: no more memory"
                    await asyncio.sleep(0.7)  # of a start
                    setup.engines[number].restart()
                    setup.stream.add_engine(number, setup.version)

        setup.stream.open(0)
        recovering = asyncio.ensure_future(recover())
        steps = []
        for number in range(24):
            if number % 6 == 2:
                setup.engines[number % engines].dies_at = loop.time() + 0.031
            steps.append(await setup.step(train_s=0.2))
        recovering.cancel()
        return steps, setup

    (steps, setup), _ = run(learn())
    for rows in steps:
        _check(rows, 4, 2)
    assert sum(rows.metrics["stream/lost_engines"] for rows in steps) == 4
    groups = [group.group.number for rows in steps for group in rows.groups]
    samples = [end.sample for rows in steps for group in rows.groups for end in group.ended]
    assert len(groups) == len(set(groups)) == 96 and len(samples) == len(set(samples))
    for rows in steps:
        for group in rows.groups:
            for end in group.ended:
                assert end.tokens == setup.lengths[end.group, end.index]
    lost = [event for rows in steps for event in rows.events if event["event"] == "lost_engine"]
    assert len(lost) == 4 and any(event["samples"] for event in lost)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("dies_after_s", [0.0, 0.1])
def test_other_prompts_of_a_lost_engine_are_submitted_again(engines: int, dies_after_s: float) -> None:
    def shares(setup: _Setup, first: int) -> dict[int, list[Request]]:
        sampling = SamplingConfig()
        requests = [Request(sample, [1, 2], sampling, sample) for sample in range(first, first + 6)]
        setup.lengths |= {(request.group, 0): 2 if request.sample % 2 else 50 for request in requests}
        share = len(requests) // engines
        return {engine: requests[engine * share : (engine + 1) * share] for engine in range(engines)}

    async def learn() -> list[int]:
        setup = _Setup(StreamLimits(4, 1), engines=engines, slots=30, kind=_Mortal, restarts=3)
        setup.stream.open(0)
        await setup.step()
        responding = [asyncio.ensure_future(setup.stream.respond(shares(setup, 500)))]
        setup.engines[0].dies_at = asyncio.get_running_loop().time() + dies_after_s
        await asyncio.sleep(0.2)
        assert list(setup.stream.take_lost()) == [0]
        responding.append(asyncio.ensure_future(setup.stream.respond(shares(setup, 600))))  # while it is lost
        await asyncio.sleep(0.2)
        setup.engines[0].restart()
        setup.stream.add_engine(0, setup.version)
        rows = await asyncio.wait_for(asyncio.gather(*responding), 100)
        assert not setup.stream._others
        return [row.packed[row.index] for others in rows for row in others.rows]

    assert run(learn())[0] == [*range(500, 506), *range(600, 606)]


def test_one_engine_more_than_may_be_lost_ends_the_wait_for_groups() -> None:
    async def learn() -> None:
        setup = _Setup(StreamLimits(4, 0), engines=3, kind=_Mortal, restarts=1)
        setup.engines[0].dies_at = 0.01
        setup.engines[2].dies_at = 0.02
        setup.stream.open(0)
        with pytest.raises(EngineError, match="no more memory"):
            await setup.stream.take(0)
        assert list(setup.stream.take_lost()) == [0]
        assert "engines that are restarted: 0" in setup.stream.waiting_for()

    run(learn())
