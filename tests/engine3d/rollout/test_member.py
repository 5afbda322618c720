"""An engine whose ranks are on two hosts: it generates what one on one host does, and tells of a part that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine3d import rendezvous
from engine3d.errors import LOST_RANKS, EngineError, UserError
from engine3d.rollout import EngineMember, EngineShard, Response, RolloutConfig, RolloutEngine, SamplingConfig
from engine3d.rollout.shard import ShardCalls
from tests.support import tiny_families
from tests.support.checkpoint_sender import CheckpointSender
from tests.support.engine_responses import responses_of
from tests.support.tiny_rollout import WITH_ROUTES
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes

TWO = WITH_ROUTES.model_copy(update={"tp": 2, "ep": 2})
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [3, 4, 5] * 6]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=10, ignore_eos=True)


@contextmanager
def on_two_hosts(model: Path, config: RolloutConfig) -> Iterator[tuple[RolloutEngine, EngineMember]]:
    """Both parts of an engine, started."""
    served = rendezvous.serve(rendezvous.listen("127.0.0.1"))
    address = rendezvous.tcp_address(served.host, served.port)
    first = RolloutEngine(model, config, shard=EngineShard(0, 2, address))
    second = EngineMember(model, config, shard=EngineShard(1, 2, address))
    try:
        with warm_starts(), ThreadPoolExecutor() as pool:
            starts = [pool.submit(shard.start) for shard in (first, second)]
            for start in starts:
                start.result()
        yield first, second
    finally:
        first.shutdown()
        second.shutdown()


def assert_same(responses: list[list[Response]], expected: list[list[Response]], version: int) -> None:
    for group, of_one in zip(responses, expected, strict=True):
        for response, reference in zip(group, of_one, strict=True):
            assert (response.token_ids, set(response.versions)) == (reference.token_ids, {version})
            assert response.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
            assert response.routes is not None and reference.routes is not None
            assert len(response.routes) > 0 and response.routes.tolist() == reference.routes.tolist()


@pytest.mark.long
def test_two_hosts_generate_what_one_does_and_the_death_of_one_is_told(tmp_path: Path) -> None:
    started, sent = tmp_path / "started", tmp_path / "sent"
    tiny_families.make("deepseek_v3", started, seed=1)
    tiny_families.make("deepseek_v3", sent)
    with warm_starts(), RolloutEngine(sent, TWO) as one:
        expected = responses_of(one, PROMPTS, GREEDY)
    released = TWO.model_copy(update={"memory_saver": True, "release_weights": True})
    with on_two_hosts(started, released) as (first, second):
        sender = CheckpointSender(first, sent)
        assert all(first.verify_weights(sent))
        sender.transfer(sent, version=1)
        assert_same(responses_of(first, PROMPTS, GREEDY), expected, version=1)
        assert first.verify_weights(sent) == [[], []]
        first.release_memory()
        first.restore_memory()
        with pytest.raises(EngineError, match="weights are not whole"):
            responses_of(first, PROMPTS, GREEDY)
        sender.transfer(sent, version=2)
        assert_same(responses_of(first, PROMPTS, GREEDY), expected, version=2)
        assert first.verify_weights(sent) == [[], []]
        second.check("generate")
        assert second._host is not None
        os.kill(second._host.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=f"died during generation: {LOST_RANKS}: .*gloo"):
            responses_of(first, [[5]] * 60, SamplingConfig(max_new_tokens=60, ignore_eos=True))
        deadline = time.monotonic() + 120
        while second.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(EngineError, match="died during generate: its process was killed by SIGKILL"):
            second.check("generate")


def test_calls_end_on_every_host_and_wait_for_the_first(tmp_path: Path) -> None:
    served = rendezvous.serve(rendezvous.listen("127.0.0.1"))
    address = rendezvous.tcp_address(served.host, served.port)
    first, second = (ShardCalls(EngineShard(index, 2, address), 10.0) for index in range(2))
    looks: list[float] = []
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            looks.clear()
            waiting = pool.submit(second.wait, lambda: looks.append(time.monotonic()))
            time.sleep(0.2)
            assert not waiting.done()
            first.done()
            waiting.result(120)
            assert looks

        def check() -> None:
            raise EngineError("this host's part has died")

        with pytest.raises(EngineError, match="this host's part has died"):
            second.wait(check)


@pytest.mark.parametrize(
    ("shard", "devices", "line"),
    [
        (EngineShard(2, 2, "tcp://127.0.0.1:1"), (), "shard 2 of a rollout engine on 2 hosts"),
        (EngineShard(1, 3, "tcp://127.0.0.1:1"), (), "of tp 2 on 3 hosts, expected as many ranks on each"),
        (EngineShard(1, 2), (), "on 2 hosts without a store at which they meet"),
        (
            EngineShard(1, 2, "tcp://127.0.0.1:1"),
            (0, 1),
            "2 devices for a rollout engine of tp 2, of which 1 are",
        ),
        (EngineShard(), (), "shard 0 of a rollout engine is a RolloutEngine"),
    ],
)
def test_impossible_shards_are_refused(shard: EngineShard, devices: tuple[int, ...], line: str) -> None:
    with pytest.raises(UserError, match=line):
        EngineMember("nowhere", TWO, devices, shard=shard)
