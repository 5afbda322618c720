"""Engines of which each is on two hosts: what is learned from them, their weights, and the death of a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.rundir.status.first_failure import read_failure
from tests.support.hosts import hosts_or_skip
from tests.support.hosts.cluster import Hosts
from tests.support.hosts.launching import Launch, agent_command, learned, small_run, start, start_agents
from tests.support.runs import ROOT, records, run
from tests.support.tiny_families import DEEPSEEK

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

SETTINGS = [
    "warmup=null",
    "rollout.engine.tp=2",
    "rollout.engine.ep=2",
    "rollout.verify_weights=true",
    "train.routing_replay=rollout",
]
OF_DEMO = {"vocab_size": 32, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}


def start_by_role(hosts: Hosts, directory: Path, *settings: str) -> Launch:
    """The recipe of several hosts, its trainer on the first one."""
    words = [str(ROOT / "launch/recipes/several-hosts.yaml"), *small_run(directory, *settings)[1:]]

    def command(index: int) -> list[str]:
        role, slots = ("rollout", 1) if index else ("train", 2)
        return agent_command(index, len(hosts), *words, role=role, slots=slots)

    return start(hosts, directory, command)


@pytest.mark.parametrize(
    ("placed", "on_one_host", "shares"),
    [
        (None, "{actor: 'cpu:0-1', rollout: 'cpu:2-3'}", False),
        # On the trainer's devices, whose memory the engine's weights are where the bytes are the same.
        pytest.param(
            "{actor: 'cpu:4,8', rollout: 'cpu:4,8'}",
            "{actor: 'cpu:0-1', rollout: 'cpu:0-1'}",
            True,
            marks=pytest.mark.release,
        ),
    ],
    ids=["recipe", "colocated"],
)
def test_an_engine_on_two_hosts_learns_what_one_on_one_host_does(
    tmp_path: Path, placed: str | None, on_one_host: str, shares: bool
) -> None:
    settings = [*SETTINGS, "trainer.steps=2"]
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        if placed is None:
            launch = start_by_role(hosts, tmp_path, *settings)
        else:
            launch = start_agents(hosts, tmp_path, *settings, f"placement={placed}")
        launch.until_in("rollout", 1)
        where = [[log for log in ("rollout-0", "rollout-1") if launch.logs_to(host, log)] for host in range(3)]
        assert launch.wait() == [0, 0, 0], launch.outputs()
        assert where == [[], ["rollout-0"], ["rollout-1"]]
        crosses = "placement.rollout: 1 of 1 tensor-parallel groups are on several nodes (ranks 0-1 on host-1, host-2)"
        assert crosses in launch.output(0)
        assert launch.left() == []
    one = tmp_path / "one"
    one.mkdir()
    done = run(one, *settings, f"placement={on_one_host}")
    assert done.returncode == 0, done.stderr
    results = learned(launch.run)
    assert sum("train/gradient_norm" in record for record in results) == 2
    assert [record["train/missing_route_share"] for record in records(launch.run, "train")] == [0, 0]
    assert results == learned(one / "small")
    aliased = {record["sync/aliased_bytes"] for record in records(launch.run, "train")}
    assert aliased == {record["sync/aliased_bytes"] for record in records(one / "small", "train")}
    assert (aliased != {0}) == shares


@pytest.mark.release
def test_an_engine_of_deepseek_v3_that_loses_a_host_names_the_part_that_died(tmp_path: Path) -> None:
    settings = [
        *SETTINGS,
        f"model.create.config={json.dumps(DEEPSEEK | OF_DEMO)}",
        "rollout.engine.deterministic=false",  # which SGLang has for this family on GPUs alone
        "trainer.steps=1000",
        "limits.stop_s=5",
    ]
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *settings, "placement={actor: 'cpu:0-1', rollout: 'cpu:4,8'}")
        launch.until_in("update", 3)
        assert max(record["mismatch/logprob_abs_diff_mean"] for record in records(launch.run, "train")) < 1e-4
        launch.until_in("rollout", 4)
        [pid] = launch.pids(2, "sglang::scheduler")
        hosts[2].run(["kill", "-KILL", str(pid)], check=True)
        assert launch.wait() == [1, 1, 1], launch.outputs()
        card = read_failure(launch.run)
        assert card is not None
        assert (card.host, card.role, card.rank) == ("host-2", "rollout", 1), card
        assert "rollout engine died during " in card.cause and "crashed with exit code -9" in card.cause
        assert launch.left() == []
