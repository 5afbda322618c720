"""A stream whose steps are submitted together: one wave at a time, in draw order, shares side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.virtual_clock import run
from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import EngineStats, Request
from hybridflow.batch.stored_rows import SampleEnds
from hybridflow.data.prompts import Draw
from hybridflow.rollout import controller
from hybridflow.rollout import source as source_module
from hybridflow.rollout.engine_handles import EngineHandles
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.other_requests import OtherRows
from hybridflow.rollout.source import RolloutSource
from hybridflow.rollout.stream.groups import StepRows
from tests.hybridflow.rollout.stream.test_stream import SAMPLES, _check, _Named, _Setup
from tests.hybridflow.rollout.test_source import make_source


class _Recorded(_Named):
    """Remembers each submission, and the requests that were in flight when it came."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.submissions: list[list[int]] = []
        self.flying: list[int] = []

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self.flying.append(len(self._waiting) + len(self._running))
        self.submissions.append([request.group for request in requests])
        await super().submit(requests, together=together)


def _together(max_staleness: int, groups: int = 5) -> _Setup:
    return _Setup(StreamLimits(groups, max_staleness), kind=_Recorded, together=True)


def _others(count: int, first: int) -> dict[int, list[Request]]:
    """Requests of another draw, for both engines."""
    requests = [
        Request(first + row, [1, 2], SamplingConfig(), 1000 + row, prompt_index=int(row >= count // 2))
        for row in range(count)
    ]
    return {0: requests[: count // 2], 1: requests[count // 2 :]}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_each_step_is_one_submission_to_each_engine_in_draw_order(max_staleness: int) -> None:
    async def learn() -> tuple[_Setup, list[StepRows]]:
        setup = _together(max_staleness)
        setup.stream.ledger.draws_left = 20
        setup.stream.open(0)
        return setup, [await setup.step() for _ in range(4)]

    (setup, steps), _ = run(learn())
    for number, rows in enumerate(steps):
        _check(rows, 5, max_staleness)
        assert [group.group.number for group in rows.groups] == list(range(5 * number, 5 * number + 5))
        assert rows.taken.staleness == (min(number, max_staleness),) * 5
    for engine, share in enumerate((range(2), range(2, 5))):
        waves = [[5 * wave + group for group in share for _ in range(SAMPLES)] for wave in range(4)]
        assert setup.engines[engine].submissions == waves
        assert setup.engines[engine].flying == [0] * 4
    assert setup.drawn == 20  # and nothing ahead of the last step


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_a_loop_of_ones_own_may_take_more_steps_than_the_run_has(max_staleness: int, together: bool) -> None:
    async def learn() -> tuple[list[int], list[int]]:
        setup = _Setup(StreamLimits(5, max_staleness), kind=_Recorded, together=together)
        setup.stream.ledger.draws_left = 10
        setup.stream.open(0)
        groups, drawn = list[int](), list[int]()
        for _ in range(4):
            groups += [rows.group.number for rows in (await setup.step()).groups]
            drawn.append(setup.drawn)
        return groups, drawn

    (groups, drawn), _ = run(learn())
    assert sorted(groups) == list(range(20))
    assert drawn[1:] == [10, 15, 20]


class _Failing(_Recorded):
    """Aborts the first response of its first submissions of its own accord."""

    aborts = 1

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        await super().submit(requests, together=together)
        if len(self.submissions) <= self.aborts:
            await self.abort([requests[0].sample])

    async def ended(self) -> SampleEnds:
        ended = await super().ended()
        return SampleEnds(
            [end if end.complete else replace(end, error="ValueError: too long") for end in ended.samples]
        )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_response_that_an_engine_aborts_is_made_again(max_staleness: int) -> None:
    async def learn() -> tuple[_Setup, list[StepRows]]:
        setup = _Setup(StreamLimits(5, max_staleness), kind=_Failing, together=True)
        setup.stream.open(0)
        return setup, [await setup.step() for _ in range(3)]

    (setup, steps), _ = run(learn())
    for number, rows in enumerate(steps):
        _check(rows, 5, max_staleness)
        assert [group.group.number for group in rows.groups] == list(range(5 * number, 5 * number + 5))
    assert [group.group.attempt for group in steps[0].groups] == [1, 0, 1, 0, 0]
    assert steps[0].metrics["stream/lost_groups"] == 2
    assert all(flying == 0 for engine in setup.engines for flying in engine.flying)


def test_responses_that_an_engine_aborts_again_and_again_end_the_run_with_its_reason() -> None:
    class Broken(_Failing):
        aborts = 99

    async def learn() -> None:
        setup = _Setup(StreamLimits(5, 0), kind=Broken, together=True)
        setup.stream.open(0)
        await setup.step()

    message = r"engines aborted responses to the prompt of draw \d 3 times: ValueError: too long"
    with pytest.raises(EngineError, match=message):
        run(learn())


def test_an_abandoned_step_draws_no_prompt_twice_that_an_engine_has_aborted() -> None:
    async def learn() -> _Setup:
        setup = _Setup(StreamLimits(5, 0), kind=_Failing, together=True)
        setup.stream.open(0)
        setup.stream.next_groups()
        setup.stream._send(setup.stream._dispatcher.send_shares())
        await setup.stream.drain()
        assert len(setup.stream.ledger.returned) == 2
        await setup.stream.abandon(set())
        return setup

    setup, _ = run(learn())
    assert not (setup.stream.ledger.returned or setup.stream.ledger.groups or setup.stream._dispatcher.waiting)


@pytest.mark.parametrize("together", [False, True])
def test_no_requests_have_no_responses(together: bool) -> None:
    async def respond() -> OtherRows:
        setup = _Setup(StreamLimits(5, 0), together=together)
        setup.stream.open(0)
        return await setup.stream.respond({0: []})

    assert run(respond())[0] == OtherRows((), ())


def test_other_prompts_wait_for_a_step_and_a_step_for_them() -> None:
    async def learn() -> tuple[_Setup, list[int], tuple[Any, ...]]:
        setup = _together(1)
        setup.stream.open(0)
        await setup.step()  # the next step's are in flight
        setup.stream.groups.samples_drawn = 100
        responding = asyncio.create_task(setup.stream.respond(_others(4, 50)))
        await asyncio.sleep(0)
        await setup.step()
        rows = await responding
        await setup.stream.drain()
        return setup, [row.packed[row.index] for row in rows.rows], rows.busy

    (setup, samples, busy), _ = run(learn())
    assert samples == [50, 51, 52, 53]
    assert sorted(engine for engine, *_ in busy) == [0, 1] and all(begin < end for _, begin, end in busy)
    assert all(flying == 0 for engine in setup.engines for flying in engine.flying)


@pytest.mark.parametrize(
    ("max_staleness", "message"),
    [(0, "4 of 4 responses were aborted"), (1, "4 responses were not begun: the step was abandoned")],
)
def test_an_abandoned_step_is_as_if_it_had_not_begun(max_staleness: int, message: str) -> None:
    async def learn() -> tuple[_Setup, set[int], set[int]]:
        setup = _together(max_staleness)
        setup.stream.open(0)
        await setup.step()
        kept = {group.number for group in setup.stream.ledger.groups}
        await setup.stream.take(setup.version)  # with staleness the next step's are in flight after it
        responding = asyncio.create_task(setup.stream.respond(_others(4, 500)))
        await asyncio.sleep(0.001)
        await setup.stream.abandon(kept)
        with pytest.raises(EngineError, match=message):
            await responding
        state = await setup.stream.state()
        return setup, kept, {group.group.number for group in state.groups if len(group.ended) == SAMPLES}

    (setup, kept, complete), _ = run(learn())
    assert kept == complete == set(range(5, 5 + 5 * max_staleness))
    assert not setup.stream._dispatcher.requests and not setup.stream.ledger.returned


def test_a_step_is_abandoned_while_its_other_prompts_are_submitted() -> None:
    class Slow(_Recorded):
        async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
            await asyncio.sleep(0.05 if requests[0].sample >= 500 else 0)
            await super().submit(requests, together=together)

        async def abort(self, samples: Sequence[int]) -> None:
            aborted.append(list(samples))
            await super().abort(samples)

    aborted: list[list[int]] = []

    async def learn() -> None:
        setup = _Setup(StreamLimits(5, 0), kind=Slow, together=True)
        setup.stream.open(0)
        await setup.stream.take(0)
        responding = asyncio.create_task(setup.stream.respond(_others(4, 500)))
        await asyncio.sleep(0.01)
        await setup.stream.abandon(set())
        with pytest.raises(EngineError, match="4 of 4 responses were aborted"):
            await responding

    run(learn())
    assert sorted(aborted) == [[500, 501], [502, 503]]


def test_an_end_that_nobody_waits_for_is_ignored() -> None:
    async def learn() -> int:
        setup = _together(0)
        setup.stream.open(0)
        await setup.step()
        responding = asyncio.create_task(setup.stream.respond(_others(4, 500)))
        await asyncio.sleep(0.001)
        responding.cancel()
        return len((await setup.step()).groups)

    assert run(learn())[0] == 5


def test_a_checkpoint_waits_for_what_runs_ahead() -> None:
    async def learn() -> tuple[list[int], list[StepRows]]:
        setup = _together(1)
        setup.stream.open(0)
        await setup.step(train_s=0.0)
        state = await setup.stream.state()
        assert all(len(group.ended) == SAMPLES and not state.prefixes for group in state.groups)
        setup.stream.close()
        setup.stream = setup.another()
        setup.stream.restore(state)
        setup.stream.open(setup.version)
        return [group.group.number for group in state.groups], [await setup.step() for _ in range(2)]

    (saved, steps), _ = run(learn())
    assert [[group.group.number for group in rows.groups] for rows in steps] == [saved, list(range(10, 15))]


@pytest.fixture
def open_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], RolloutSource]:
    """Opens the driver's end of a stream with this `max_staleness`: four prompts a step, two stand-in engines."""

    def opened(max_staleness: int) -> RolloutSource:
        source = make_source(EngineHandles(actors=[None, None], nodes=["", ""]), max_staleness)
        source.open(0, steps_left=9)
        return source

    monkeypatch.setattr(controller, "RemoteEngine", lambda *_: _Named(4, lambda n: 0.001, lambda request: 5))
    monkeypatch.setattr(source_module, "gathered", list)
    monkeypatch.setattr(RolloutSource, "_open_engine", lambda *_: EngineStats(1))
    return opened


def test_a_step_may_generate_only_some_of_its_prompts(open_source: Callable[[int], RolloutSource]) -> None:
    with closing(open_source(0)) as source:
        drawn = source.draw()
        for half in (slice(0, 2), slice(2, 4)):
            rollout = source.rollout(Draw(drawn.prompts, drawn.indices[half], drawn.groups[half]), 1)
            assert len(rollout.batch) == 2 * SAMPLES
        with pytest.raises(UserError, match=r"^step 1: responses to draw 7, expected only draws of this step$"):
            source.rollout(Draw(drawn.prompts, [0], [7]), 1)
        source.trained(0, {})
        assert source.draw().groups == [4, 5, 6, 7]
        assert len(source.rollout(source.draw(4), 2).batch) == 4 * SAMPLES


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_prompts_that_a_step_drew_and_did_not_generate_are_used(
    max_staleness: int, open_source: Callable[[int], RolloutSource]
) -> None:
    with closing(open_source(max_staleness)) as source:
        assert source.draw().groups == [0, 1, 2, 3]
        source.trained(0, {})
        assert source.snapshot().groups is None
        drawn = source.draw()
        assert drawn.groups == [4, 5, 6, 7]
        assert len(source.rollout(drawn, 2).batch) == 4 * SAMPLES


def test_a_step_has_one_rollout_where_rollouts_run_ahead(open_source: Callable[[int], RolloutSource]) -> None:
    with closing(open_source(1)) as source:
        source.rollout(source.draw(), 1)
        with pytest.raises(UserError, match="expected one rollout for each update"):
            source.draw()
        source.trained(0, {})
        assert len(source.rollout(source.draw(), 2).batch) == 4 * SAMPLES
