"""Runs on hosts that share no disk for the run's directory: what is in that of host 0, and what is refused."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import find_checkpoints
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import load_recipe
from hybridflow.rundir.status.first_failure import read_failure
from hybridflow.rundir.status.heartbeat import read_heartbeat
from hybridflow.rundir.status.hosts_file import read_hosts
from tests.support.hosts import Hosts, hosts_or_skip
from tests.support.hosts.launching import Launch, agent_command, environment, small_run, start, start_agents
from tests.support.runs import DEMO, ROOT

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

SETTINGS = [
    "warmup=null",
    "trainer.steps=1000",
    "evaluation.eval.before_train=false",
    "limits.host_s=8",
    "limits.stop_s=5",
    "placement.actor=cpu:0,4",
    "placement.rollout=cpu:8",
]
"""A rank of the trainer on each of the first two hosts, the engine on the third."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that all hosts see."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def own_dir(tmp_path: Path) -> Path:
    """A directory of runs that is another one on each host."""
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture
def hosts(shared: Path, own_dir: Path) -> Iterator[Hosts]:
    with hosts_or_skip(3, shared=shared, private=[own_dir]) as made:
        yield made


def no_files_in_common(shared: Path) -> list[str]:
    """Settings of a run whose ranks have a model that is there, and write nothing together."""
    create_model(load_recipe(DEMO).model, shared / "model", seed=1)
    return [f"model={{path: {shared}/model, create: null}}", "trainer.export=false"]


def say(launch: Launch, host: int, log: str, line: str) -> None:
    """A line into a log on its host, as its rank would write it."""
    launch.hosts[host].run(["sh", "-c", f"echo '{line}' >> {launch.own_dir}/small/logs/{log}"], check=True)


def test_logs_of_all_hosts_are_on_the_first_while_the_run_goes_on_and_when_it_fails(
    hosts: Hosts, shared: Path, own_dir: Path
) -> None:
    settings = [*SETTINGS, *no_files_in_common(shared)]
    launch = start_agents(hosts, shared, *settings, own_dir=own_dir, cold="host")
    launch.until_in("update")
    logs = launch.run / "logs"
    here = {path.name for path in logs.iterdir()}
    assert {"actor-1.log", "actor-1.heartbeat", "rollout-0.heartbeat", "sglang-0.log"} <= here
    assert not (launch.run_on(1) / "logs/actor-0.log").exists()
    beat = read_heartbeat(logs / "actor-1.heartbeat")
    assert beat is not None and beat.host == "host-1" and beat.at > time.time() - 120
    assert [host.shares_disk for host in read_hosts(launch.run)] == [True, False, False]

    shown = shared / "followed"
    command = [sys.executable, "-m", "hybridflow"]
    followed = [*command, "logs", f"{own_dir}/small", "--follow", "--host", "host-1"]
    with shown.open("w") as output:
        follower = hosts[0].start(followed, env=environment(shared), cwd=ROOT, stdout=output)
    launch.until(lambda: "actor-1: " in shown.read_text() or follower.poll() is not None)
    say(launch, 1, "actor-1.log", "a line of host 1")
    launch.until(lambda: "actor-1: a line of host 1\n" in shown.read_text())
    assert "actor-0: " not in shown.read_text() and "sglang-0: " not in shown.read_text()
    status = (
        hosts[0]
        .run([*command, "status", f"{own_dir}/small"], env=environment(shared), cwd=ROOT, check=True, timeout_s=240)
        .stdout
    )
    assert "\nhosts host-0, host-1, host-2\n" in status, status
    assert "\nactor-1    on host-1: " in status and "\nsglang-0   on host-2: " in status, status
    assert "\nrollout-0  on host-2: " in status, status

    say(launch, 1, "actor-1.log", "the last line")
    launch.kill_rank(1, "actor-1")
    assert launch.wait() == [1, 1, 1], launch.outputs()
    card = read_failure(launch.run)
    assert card is not None and (card.role, card.rank, card.host) == ("actor", 1, "host-1"), launch.outputs()
    assert card.last_line == "the last line"
    assert card.stacks == f"{own_dir}/small/logs/*.stacks"
    assert f"(log: {own_dir}/small/logs/actor-1.log)" in launch.output(0)
    for name in ("actor-0", "rollout-0", "sglang-0", "reward-0", "driver"):
        assert "most recent call first" in (logs / f"{name}.stacks").read_text(), name
    for host, log in ((1, "actor-1.log"), (2, "rollout-0.log"), (2, "rollout-0.stacks"), (2, "sglang-0.stacks")):
        assert (logs / log).read_bytes() == (launch.run_on(host) / "logs" / log).read_bytes(), log
    assert follower.wait(180) == 0
    assert launch.left() == []


def test_what_hosts_would_have_to_share_is_refused_before_the_start(hosts: Hosts, shared: Path, own_dir: Path) -> None:
    launch = start_agents(hosts, shared, *SETTINGS, "checkpoint.save_interval=2", own_dir=own_dir)
    assert launch.wait() == [2, 2, 2], launch.outputs()
    lines_said = [line for line in launch.output(0).splitlines() if "another directory on host-1" in line]
    run = own_dir / "small"
    also = "or run_dir on a disk that all of them see"
    assert lines_said == [
        f"hybridflow: model.create: the model that the driver makes would be in {run}, which is another directory on "
        f"host-1, host-2 than on host-0; expected model.path, {also}",
        f"hybridflow: checkpoint.save_interval=2: checkpoints would be in {run}/checkpoints, which is another "
        "directory on host-1 than on host-0; expected checkpoint.dir on a disk that all of them see, or "
        f"save_interval=null, {also}",
        f"hybridflow: trainer.export=true: the trained model would be in {run}/model, which is another directory on "
        "host-1 than on host-0; expected trainer.export=false; hybridflow checkpoint export makes it of a checkpoint, "
        f"{also}",
    ]
    assert not launch.run.exists()
    assert launch.left() == []


@pytest.mark.release
def test_a_run_is_started_again_from_checkpoints_that_all_see(hosts: Hosts, shared: Path, own_dir: Path) -> None:
    saving = [f"checkpoint={{dir: {shared}/checkpoints, save_interval: 1}}", "trainer.steps=6"]
    words = small_run(own_dir, *SETTINGS, *no_files_in_common(shared), *saving)
    launch = start(hosts, shared, lambda index: agent_command(index, 3, *words, restarts=1 if index == 0 else 0))
    launch.own_dir = own_dir
    launch.until(lambda: any((shared / "checkpoints").glob("step-*/manifest.json")))
    launch.kill_rank(0, "actor-0")
    launch.until(lambda: (launch.run / "flight-recorder/gloo/actor_1").exists())
    assert launch.wait() == [0, 0, 0], launch.outputs()
    assert "starting the run again (1 of 1), after: actor rank 0" in launch.output(0), launch.outputs()
    complete, _ = find_checkpoints(shared / "checkpoints")
    assert complete[0].name == "step-00000006"
    for host, log in ((1, "actor-1.log"), (2, "sglang-0.log"), (2, "rollout-0.log")):
        here, there = launch.run / "logs" / log, launch.run_on(host) / "logs" / log
        # An engine begins its log anew; host 0 has that of its first start too.
        assert here.read_bytes().endswith(there.read_bytes()), log
        assert here.stat().st_size > there.stat().st_size or log != "sglang-0.log"
    assert not (launch.run_on(1) / "logs.1").exists()
    assert launch.left() == []
