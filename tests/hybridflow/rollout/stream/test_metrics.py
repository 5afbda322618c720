"""Figures of a stream, on a clock that jumps and of engines that are told what to say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from benchmarks.virtual_clock import run
from engine3d.rollout import Response
from engine3d.rollout.requests import EngineStats, Request
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream


class _Scripted:
    """Ends what it is told to, and tells how it is."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._ended: asyncio.Queue[SampleEnds] = asyncio.Queue()

    def report(self, stats: EngineStats, *requests: Request, tokens: int = 10, oldest: int = 0) -> None:
        ends = [SampleEnd(request.sample, request.group, request.index, tokens, oldest, True) for request in requests]
        self._ended.put_nowait(SampleEnds(ends, stats=stats))

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self.requests += requests

    async def ended(self) -> SampleEnds:
        return await self._ended.get()

    async def abort(self, samples: Sequence[int]) -> None:
        pass

    async def in_flight(self) -> Mapping[int, Response]:
        return {}

    async def submit_others(self, requests: Sequence[Request]) -> None:
        raise NotImplementedError("no test submits other requests here")


def _stream(engines: int, groups: int, staleness: int) -> tuple[RolloutStream, list[_Scripted]]:
    scripted, numbers = [_Scripted() for _ in range(engines)], iter(range(1000))
    stream = RolloutStream(
        StreamPlan(StreamLimits(groups, staleness), 1, 8, engines),
        scripted,
        lambda count: [(number, 0) for number in (next(numbers) for _ in range(count))],
        lambda _: range(3),
        asyncio.get_running_loop().time,
    )
    return stream, scripted


def test_a_step_tells_how_long_its_samples_waited_for_it() -> None:
    async def learn() -> list[Mapping[str, float]]:
        stream, (engine,) = _stream(1, 2, 1)
        stream.open(0, [EngineStats(100)])
        await asyncio.sleep(1)
        for request in list(engine.requests):  # at 1, 2, 3 and 4 s
            engine.report(EngineStats(100), request)
            await asyncio.sleep(1)
        first = await stream.take(0)
        await asyncio.sleep(2)
        stream.trained(1)
        second = await stream.take(1)
        return [first.metrics, second.metrics]

    first, second = run(learn())[0]
    assert (first["stream/sample_age_mean_sec"], first["stream/sample_age_max_sec"]) == (3.5, 4.0)
    assert (second["stream/sample_age_mean_sec"], second["stream/sample_age_max_sec"]) == (3.5, 4.0)


def test_ages_are_forgotten_with_their_samples_and_kept_for_a_step_that_did_not_learn() -> None:
    async def learn() -> list[float]:
        stream, (engine,) = _stream(1, 2, 0)
        stream.open(0)
        await asyncio.sleep(0)
        engine.report(EngineStats(100), *engine.requests)
        ages = []
        for _ in range(2):
            rows = await stream.take(0)
            ages.append(rows.metrics["stream/sample_age_max_sec"])
            stream.groups.return_taken()
            await asyncio.sleep(5)
        await stream.take(0)
        assert len(stream.metrics._ended_at) == 2
        stream.trained(1)
        assert not stream.metrics._ended_at
        return ages

    assert run(learn())[0] == [0.0, 5.0]


def test_what_engines_tell_is_over_the_time_between_two_steps() -> None:
    async def learn() -> list[Mapping[str, float]]:
        stream, (one, other) = _stream(2, 2, 0)
        before = EngineStats(100, 0, 0, 7, 10, 300, 1000, 500, 3, 4)  # counted before the stream
        stream.open(0, [before, EngineStats(200)])
        await asyncio.sleep(2)
        one.report(EngineStats(100, 50, 6, 9, 20, 700, 1100, 560, 3, 4, verified=10, accepted=5))
        await asyncio.sleep(2)
        one.report(EngineStats(100, 30, 0, 10, 50, 3100, 1200, 560, 5, 4, verified=10, accepted=5), *one.requests)
        other.report(EngineStats(200, 20, 0, 0, 40, 800, 200, 100, 0, 6, verified=30, accepted=15), *other.requests)
        await asyncio.sleep(6)
        first = await stream.take(0)
        stream.trained(1)
        await asyncio.sleep(1)
        one.report(EngineStats(100, 10, 0, 2, 2, 20, 50, 50, 0, 1), *one.requests[1:], oldest=1)  # it was started again
        other.report(EngineStats(200, 20, 0, 0, 42, 860, 200, 100, 0, 6), *other.requests[1:], oldest=1)
        await asyncio.sleep(1)
        return [first.metrics, (await stream.take(1)).metrics]

    first, second = run(learn())[0]
    # One had 40 tokens of 100 in use in ten batches and 80 in thirty; the other 20 of 200 in forty.
    assert first["stream/cache_use_share"] == pytest.approx((10 * 0.4 + 30 * 0.8 + 40 * 0.1) / 80)
    assert first["stream/cache_use_max"] == 0.8
    assert first["stream/queued_requests_mean"] == pytest.approx(2 * 6 / 10)
    assert first["stream/retracted_requests"] == 3
    assert first["stream/prefix_hit_share"] == pytest.approx((60 + 100) / (200 + 200))
    assert (first["stream/resent_samples"], first["stream/continued_samples"]) == (2, 6)
    assert first["stream/requests_in_flight_mean"] == pytest.approx(2 * 4 / 10)
    assert first["rollout/acceptance_length_mean"] == 1 + 20 / 40
    assert "rollout/acceptance_length_mean" not in second
    assert second["stream/retracted_requests"] == 2
    assert second["stream/prefix_hit_share"] == 1.0
    assert second["stream/cache_use_max"] == 0.15
    assert second["stream/cache_use_share"] == pytest.approx((2 * 0.1 + 2 * 0.15) / 4)


def test_engines_that_tell_nothing_have_no_figures() -> None:
    async def learn() -> Mapping[str, float]:
        stream, (engine,) = _stream(1, 1, 0)
        stream.open(0)
        await asyncio.sleep(0)
        engine._ended.put_nowait(SampleEnds([SampleEnd(0, 0, 0, 1, 0, True)]))
        return (await stream.take(0)).metrics

    assert (
        not {"stream/cache_use_share", "stream/prefix_hit_share", "stream/retracted_requests"} & run(learn())[0].keys()
    )
