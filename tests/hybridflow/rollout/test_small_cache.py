"""An engine whose KV cache is too small for all its requests: what it tells, and that fewer in flight have room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from engine3d.errors import UserError
from engine3d.rollout import Request, Response, RolloutEngine, SamplingConfig
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds
from hybridflow.roles.rollout import EngineStream
from hybridflow.rollout.adaptive_sampling import PromptSampling, SamplingTable
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream
from tests.support.engine_responses import responses_of
from tests.support.reference_routes import by_layer, reference_routes
from tests.support.tiny_rollout import TINY_ROLLOUT, WITH_ROUTES
from tests.support.transfers import started

pytestmark = pytest.mark.processes

PROMPT = [3, 4, 5, 6, 7, 8]
RESPONSE = 48
CACHE_TOKENS = 300
LONG = SamplingConfig(max_new_tokens=RESPONSE, ignore_eos=True)
SHORT = SamplingConfig(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def small_cache(tiny_model_dirs: tuple[Path, Path]) -> Iterator[RolloutEngine]:
    """An engine with room for five of the longest sequences, that runs sixteen."""
    config = WITH_ROUTES.model_copy(update={"max_total_tokens": CACHE_TOKENS, "max_running_requests": 16})
    with started([RolloutEngine(tiny_model_dirs[0], config)]) as [engine]:
        yield engine


class _Engine:
    """The engine as a controller sees it, which learns no tokens."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._requests = engine, dict[int, Request]()

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self._requests |= {request.sample: request for request in requests}
        await asyncio.to_thread(self._engine.submit, requests)

    async def ended(self) -> SampleEnds:
        taken = await asyncio.to_thread(self._engine.take_ended, 1.0)
        ends = []
        for sample, response in taken.items():
            request = self._requests.pop(sample)
            complete = response.finish_reason == "length"
            ends.append(SampleEnd(sample, request.group, request.index, len(response.token_ids), 0, complete))
        return SampleEnds(ends, stats=self._engine.stats)

    async def abort(self, samples: Sequence[int]) -> None:
        await asyncio.to_thread(self._engine.abort, samples)

    async def in_flight(self) -> Mapping[int, Response]:
        return {}


async def _steps(engine: RolloutEngine, bounds: RequestBounds | None, first_sample: int) -> list[dict[str, float]]:
    """The figures of three steps of 24 responses."""
    numbers = iter(range(1000))
    stream = RolloutStream(
        StreamPlan(StreamLimits(12, 0), 2, 16, 1, bounds, sampling=LONG),
        [_Engine(engine)],
        lambda count: [(number, number % 20) for number in (next(numbers) for _ in range(count))],
        lambda prompt: [*PROMPT, 9 + prompt],
    )
    stream.groups.samples_drawn = first_sample
    stream.open(0, [engine.stats])
    steps = []
    for _ in range(3):
        rows = await stream.take(0)
        assert all(end.tokens == RESPONSE and end.complete for group in rows.groups for end in group.ended)
        stream.trained(0)
        steps.append(rows.metrics)
    stream.close()
    return steps


@pytest.mark.long
def test_requests_in_flight_keep_within_a_cache_in_which_they_were_retracted(small_cache: RolloutEngine) -> None:
    fixed = asyncio.run(_steps(small_cache, None, 0))
    # Whatever their length: nothing is ever retracted then.
    most = CACHE_TOKENS // (len(PROMPT) + 1 + RESPONSE)
    few = asyncio.run(_steps(small_cache, RequestBounds(16, len(PROMPT) + 1 + RESPONSE, 0.05), 1000))
    usual = asyncio.run(_steps(small_cache, RequestBounds(16, len(PROMPT) + 1 + RESPONSE), 2000))
    retracted = [sum(step["stream/retracted_requests"] for step in steps) for steps in (fixed, few, usual)]
    print(retracted, fixed, few, usual)
    assert retracted[0] > 0 == retracted[1]
    assert retracted[2] < retracted[0]
    assert few[-1]["stream/request_limit_mean"] == most
    for steps in (fixed, few, usual):
        assert 0.3 < max(step["stream/cache_use_max"] for step in steps) <= 1
        # The prompts but for their last token are alike.
        assert steps[-1]["stream/prefix_hit_share"] > 0.5
    assert few[-1]["stream/queued_requests_mean"] == 0 < fixed[-1]["stream/queued_requests_mean"]


def test_retracted_responses_have_the_routes_that_they_were_drawn_with(
    small_cache: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    before = small_cache.stats.retracted
    small_cache.submit([Request(7000 + index, [*PROMPT, 9 + index], LONG) for index in range(16)])
    ended: dict[int, Response] = {}
    while len(ended) < 16:
        ended |= small_cache.take_ended(10.0)
    assert small_cache.stats.retracted > before
    for sample, response in ended.items():
        routes = reference_routes(tiny_model_dirs[0], [*PROMPT, 9 + sample - 7000, *response.token_ids])
        assert torch.equal(by_layer(response.routes, 2), routes[:-1])


def test_responses_are_as_long_as_the_table_has_it_for_their_prompts(small_cache: RolloutEngine) -> None:
    rows = [PromptSampling(prompt_tokens=2, max_new_tokens=3), PromptSampling(prompt_tokens=4, max_new_tokens=40)]
    table = SamplingTable.of(rows, SHORT)
    prompts = [[3] * length for length in (1, 2, 3, 4, 5)]
    expected = [3, 3, 40, 40, 4]
    groups = responses_of(small_cache, prompts, table, samples_per_prompt=2)
    assert [[len(response.token_ids) for response in group] for group in groups] == [
        [length] * 2 for length in expected
    ]
    stream = EngineStream(0, small_cache, lambda method: nullcontext())
    requests = [
        Request(6000 + index, prompt, table.for_prompt(len(prompt)), 0, index) for index, prompt in enumerate(prompts)
    ]
    stream.submit(requests)
    lengths: dict[int, int] = {}
    while len(lengths) < 5:
        ended, _, _ = stream.take_ended(10.0)
        lengths |= {end.index: end.tokens for end in ended.samples}
        assert ended.stats is not None and ended.stats.cache_tokens == CACHE_TOKENS
    assert [lengths[index] for index in range(5)] == expected
    long = [4] * (TINY_ROLLOUT.context_length or 0)
    with pytest.raises(UserError, match="prompt 1 has 30 tokens; at most 24 leave room for max_new_tokens 40"):
        responses_of(
            small_cache,
            [long[:60], long[:30]],
            SamplingTable.of([PromptSampling(prompt_tokens=40, max_new_tokens=40)], SHORT),
        )


def test_an_engine_tells_what_its_cache_had_of_prompts(small_cache: RolloutEngine) -> None:
    before = small_cache.stats
    for sample, cached in ((5000, 0), (5001, 19)):
        small_cache.submit([Request(sample, list(range(10, 30)), SHORT)])
        while not small_cache.take_ended(10.0):
            pass
        now = small_cache.stats
        assert now.prompt_tokens - before.prompt_tokens == 20
        assert now.cached_tokens - before.cached_tokens == cached
        assert (now.cache_tokens, now.used_tokens, now.queued) == (CACHE_TOKENS, 0, 0)
        before = now
