"""Versions of weights: committed whole or not at all, named by every sample, with the KV cache kept or flushed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import EngineError, UserError
from engine3d.rollout import Request, Response, RolloutEngine, SamplingConfig
from tests.support.engine_responses import responses_of, versions_of
from tests.support.trainer_ranks import TrainerRanks, trainer_ranks
from tests.support.transfers import Connected, connect, differences, locations

pytestmark = pytest.mark.processes

PROMPT = [list(range(3, 33))]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=8)
LONG = SamplingConfig(max_new_tokens=60, ignore_eos=True)
Run = Callable[..., Future[Any]]


@dataclass
class Writer:
    """A trainer that can bring the session's engine to weights made of a seed."""

    trainer: TrainerRanks
    connected: Connected

    def transfer(self, version: int, seed: int, *, flush_cache: bool = True) -> None:
        self.trainer.call("change", seed=seed)
        self.connected.transfer(version, flush_cache=flush_cache)


@pytest.fixture(scope="module")
def writer(
    shared_engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Writer]:
    with trainer_ranks(tiny_model_dirs[0], 1, tmp_path_factory.mktemp("trainer")) as trainer:
        sources = trainer.call("build", locations("here", 0), sizes={})
        connected = connect(trainer, [shared_engine], sources, [locations("here", 0)], tiny_model_dirs[0])
        yield Writer(trainer, connected)


@pytest.fixture
def run() -> Iterator[Run]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def logprobs(engine: RolloutEngine) -> list[float]:
    return responses_of(engine, PROMPT, GREEDY)[0][0].logprobs


@pytest.fixture
def running(writer: Writer, engine: RolloutEngine, run: Run) -> Future[list[list[Response]]]:
    """Long generations of version 20, of which some tokens are drawn already."""
    writer.transfer(20, seed=1)
    generations = run(responses_of, engine, [[5]] * 300, LONG)
    time.sleep(0.3)
    assert not generations.done()
    return generations


def test_only_what_was_begun_and_sealed_is_committed(writer: Writer, engine: RolloutEngine) -> None:
    for early in (engine.receive_weights, engine.seal_weights, engine.commit_weights):
        with pytest.raises(UserError, match="the transfer of weights version 3 was not begun"):
            early(3)
    assert set(responses_of(engine, PROMPT, GREEDY)[0][0].versions) == {0}

    writer.trainer.call("change", seed=1)
    writer.connected.write(3)
    for wrong in (engine.seal_weights, engine.commit_weights):
        with pytest.raises(UserError, match="transfer of weights version 4 was not begun, but version 3"):
            wrong(4)
    with pytest.raises(UserError, match="weights version 3 was not sealed"):
        engine.commit_weights(3)
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"weights are not whole, .*: the transfer of version 3 was not committed"
        ):
            responses_of(engine, PROMPT, GREEDY)
        engine.seal_weights(3)

    # Broken off, and begun again.
    engine.begin_weights(4)
    with pytest.raises(UserError, match="weights version 4 was not sealed"):
        engine.commit_weights(4)
    with pytest.raises(EngineError, match="the transfer of version 4 was not committed"):
        responses_of(engine, PROMPT, GREEDY)
    writer.transfer(5, seed=2)
    assert set(responses_of(engine, PROMPT, GREEDY)[0][0].versions) == {5}
    with pytest.raises(UserError, match="version 5 was not begun"):
        engine.commit_weights(5)


def test_a_whole_transfer_heals_a_broken_one(writer: Writer, engine: RolloutEngine, tmp_path: Path, run: Run) -> None:
    writer.trainer.call("change", seed=3)
    writer.connected.write(6)
    # Asked past the client, as by a thread that was just not too late: it must wait for whole weights.
    assert engine._host is not None
    request = Request(0, [5], SamplingConfig(temperature=0, max_new_tokens=2))
    engine._host.responses.submitted([0])
    engine._host.call("test", "submit", 60, requests=[request], together=True)
    time.sleep(0.3)
    assert engine.take_ended(0.0) == {}
    with pytest.raises(EngineError, match="the transfer of version 6 was not committed"):
        responses_of(engine, PROMPT, GREEDY)
    writer.transfer(8, seed=4)
    writer.trainer.call("export", directory=tmp_path / "export")
    assert engine.wait_for([0])[0].versions == [8, 8]
    assert differences([engine], tmp_path / "export") == []
    assert set(responses_of(engine, PROMPT, GREEDY)[0][0].versions) == {8}


def test_the_cache_is_flushed_or_kept_as_asked(writer: Writer, engine: RolloutEngine) -> None:
    flushed = []
    for version in (10, 12):
        writer.transfer(version, seed=10)
        logprobs(engine)
        writer.transfer(version + 1, seed=11, flush_cache=True)
        flushed.append(logprobs(engine))
    assert flushed[0] == pytest.approx(flushed[1], abs=1e-4)

    writer.transfer(14, seed=10)
    logprobs(engine)
    writer.transfer(15, seed=11, flush_cache=False)
    assert logprobs(engine) != pytest.approx(flushed[0], abs=1e-2)


def test_a_transfer_waits_for_generations_and_then_goes_on(
    running: Future[list[list[Response]]], writer: Writer, engine: RolloutEngine
) -> None:
    engine.begin_weights(21)
    generations = [group[0] for group in running.result(10)]
    assert versions_of([generations]) == {20}
    assert {(response.finish_reason, len(response.token_ids)) for response in generations} == {("length", 60)}
    writer.transfer(21, seed=2)
    assert set(responses_of(engine, PROMPT, GREEDY)[0][0].versions) == {21}


def test_a_begin_that_waits_too_long_leaves_the_old_version_served(
    running: Future[list[list[Response]]], engine: RolloutEngine
) -> None:
    with pytest.raises(EngineError, match=r"begin of weights version 23 came no further within 0\.05 s"):
        engine.begin_weights(23, timeout_s=0.05)
    assert not running.done()
    assert set(responses_of(engine, PROMPT, GREEDY)[0][0].versions) == {20}
    assert versions_of(running.result(30)) == {20}


def test_generations_that_stand_still_continue_with_the_new_version_and_say_so(
    running: Future[list[list[Response]]], writer: Writer, engine: RolloutEngine
) -> None:
    writer.trainer.call("change", seed=2)
    writer.connected.write(31, in_flight="continue")
    with pytest.raises(UserError, match="version 31 was not sealed"):
        engine.commit_weights(31)
    time.sleep(0.3)
    assert not running.done()
    engine.seal_weights(31)
    engine.commit_weights(31)
    generations = [group[0] for group in running.result(60)]
    versions = [tuple(dict.fromkeys(response.versions)) for response in generations]
    assert set(versions) <= {(20,), (20, 31), (31,)} and len(versions) - versions.count((20,)) > len(versions) / 2
    assert {len(response.token_ids) for response in generations} == {60}
    ((after,),) = responses_of(engine, PROMPT, GREEDY)
    assert set(after.versions) == {31}
