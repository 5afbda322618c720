"""Requests in flight follow the room in engines' caches: the rule, and on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from benchmarks.stand_in_engine import StandInCache, StandInEngine
from benchmarks.virtual_clock import run
from engine3d.rollout.requests import EngineStats, Request
from hybridflow.rollout.dynamic_batching import SWING, DynamicBatching, EngineReport, RequestBounds, next_limit
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream

BOUNDS = RequestBounds(most=64, sequence_tokens=100, target=0.8)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EngineReport(share=0.8, in_flight=20, ended=4), 20.0),  # as full as it is to be: as many as ended
        (EngineReport(share=0.8 - SWING, in_flight=20, ended=4), 24.0),
        (EngineReport(share=0.0, in_flight=20, ended=4), 24.0),  # two for each at most
        (EngineReport(share=0.8 + SWING / 2, in_flight=20, ended=4), 18.0),
        (EngineReport(share=1.5, in_flight=20, ended=4), 16.0),
        (EngineReport(share=0.1, in_flight=12, ended=4), 20.0),  # fewer in flight than there may be: no more are needed
        (EngineReport(share=0.1, in_flight=20, ended=4, queued=2), 20.0),  # it would only queue more
        (EngineReport(share=0.95, in_flight=20, ended=0), 20.0),
        (EngineReport(share=0.7, in_flight=18, ended=2, retracted=3), 15.0),  # what did not fit
        (EngineReport(share=0.0, in_flight=20, ended=60), 64.0),
        (EngineReport(share=0.9, in_flight=20, ended=0, retracted=20), 5.0),
    ],
)
def test_the_limit_follows_the_share_of_the_cache_in_use(report: EngineReport, expected: float) -> None:
    assert next_limit(20.0, report, BOUNDS, least=5) == pytest.approx(expected)


def test_no_more_are_sent_than_fit_for_certain_before_anything_has_ended() -> None:
    assert BOUNDS.least(1000) == 10
    assert BOUNDS.least(99) == 1
    assert BOUNDS.least(100_000) == 64
    batching = DynamicBatching(BOUNDS)
    assert batching.begin(0, EngineStats(1000, retracted=7)) == 10  # of before: nothing was sent yet
    assert batching.update(0, EngineStats(1000, 100, retracted=7), in_flight=10, ended=5, freed=0) == 15
    assert batching.update(0, EngineStats(1000, 700, retracted=10), in_flight=15, ended=0, freed=0) == 12
    assert batching.update(0, EngineStats(1000, 900, retracted=10), in_flight=11, ended=1, freed=0) == 10  # full
    assert (
        batching.update(0, EngineStats(1000, 100, retracted=2), in_flight=10, ended=0, freed=0) == 10
    )  # another process


@dataclass(frozen=True)
class _Made:
    tokens_per_s: float
    metrics: Mapping[str, float]
    """Sums of all steps but the first five."""


def _steps(cache_tokens: int, *, dynamic: bool, length: int = 200, staleness: int = 2, target: float = 0.85) -> _Made:
    """Steps of 24 groups of two on two engines that run 32 requests at most."""

    def tokens(request: Request) -> int:
        return length // 4 + (request.sample * 7919) % (3 * length // 2)

    async def learn() -> _Made:
        loop, serving = asyncio.get_running_loop(), [0]
        cache = StandInCache(cache_tokens, reserve=20, prefill_s=0.0005)
        engines = [StandInEngine(32, lambda n: 0.01 + 0.0001 * n, tokens, lambda: serving[0], cache) for _ in range(2)]
        bounds = RequestBounds(32, 10 + 2 * length, target) if dynamic else None
        numbers = iter(range(100_000))
        stream = RolloutStream(
            StreamPlan(StreamLimits(24, staleness), 2, 32, 2, bounds),
            engines,
            lambda count: [(number, 0) for number in (next(numbers) for _ in range(count))],
            lambda _: range(10),
            loop.time,
        )
        stream.open(0, [engine.stats for engine in engines if engine.stats is not None])
        sums: dict[str, float] = {}
        began, made = 0.0, 0
        for version in range(25):
            rows = await stream.take(version)
            serving[0] = version + 1
            stream.trained(version + 1)
            if version == 4:
                began = loop.time()
            if version > 4:
                made += sum(end.tokens for group in rows.groups for end in group.ended)
                sums = {name: sums.get(name, 0.0) + value for name, value in rows.metrics.items()}
        stream.close()
        return _Made(made / (loop.time() - began), sums)

    return run(learn())[0]


@pytest.mark.slow
def test_a_small_cache_is_used_with_few_retractions_and_short_queues() -> None:
    fixed, dynamic = (_steps(3000, dynamic=is_dynamic) for is_dynamic in (False, True))
    assert fixed.metrics["stream/retracted_requests"] > 100
    assert dynamic.metrics["stream/retracted_requests"] < 0.4 * fixed.metrics["stream/retracted_requests"]
    assert dynamic.metrics["stream/queued_requests_mean"] < 0.2 * fixed.metrics["stream/queued_requests_mean"]
    assert dynamic.metrics["stream/cache_use_share"] / 20 > 0.6
    assert dynamic.tokens_per_s > 0.9 * fixed.tokens_per_s


@pytest.mark.slow
def test_a_lower_target_retracts_nothing_and_uses_less() -> None:
    careful, usual = (_steps(3000, dynamic=True, target=share) for share in (0.5, 0.85))
    assert careful.metrics["stream/retracted_requests"] <= 1
    assert careful.metrics["stream/cache_use_share"] < usual.metrics["stream/cache_use_share"]


@pytest.mark.slow
def test_a_large_cache_takes_all_that_an_engine_runs() -> None:
    fixed, dynamic = (_steps(100_000, dynamic=is_dynamic) for is_dynamic in (False, True))
    assert dynamic.metrics["stream/request_limit_mean"] / 20 == 32
    assert dynamic.metrics["stream/retracted_requests"] == 0
    assert dynamic.tokens_per_s == pytest.approx(fixed.tokens_per_s)
