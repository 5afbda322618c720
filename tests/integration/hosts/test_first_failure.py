"""A run on three hosts that comes no further, or loses something: one card that names the cause, and all stacks."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.rundir.status.first_failure import FirstFailure, read_failure
from tests.support.hosts import hosts_or_skip
from tests.support.hosts.launching import Launch, start_agents

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

SETTINGS = [
    "warmup=null",
    "trainer.steps=1000",
    "evaluation.eval.before_train=false",
    "limits.host_s=8",
    "limits.stop_s=5",
    "limits.progress_s=10",
    "limits.compile_s=10",
]
APART = ["placement.actor=cpu:0,4", "placement.rollout=cpu:8"]
"""A rank of the trainer on each of the first two hosts, the engine on the third."""


def card_of(launch: Launch) -> FirstFailure:
    """The card of a run that ends with a failure on all hosts, in time; it is also the end of the output."""
    assert launch.wait() == [1, 1, 1], launch.outputs()
    card = read_failure(launch.run)
    assert card is not None, launch.outputs()
    shown = "\n".join(["hybridflow: first failure", *card.lines()])
    assert shown in launch.output(0), launch.outputs()
    assert "hybridflow: " not in launch.output(0).rpartition(shown)[2], launch.outputs()
    assert launch.left() == []
    return card


def stop(launch: Launch, host: int, pid: int) -> float:
    """Stop a process; when."""
    launch.hosts[host].run(["kill", "-STOP", str(pid)], check=True)
    return time.time()


def test_a_rank_that_is_stopped_on_another_host_is_the_cause(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *SETTINGS, *APART, cold="host")
        launch.until_in("update")
        [pid] = launch.writers(1, "actor-1")
        stopped_at = stop(launch, 1, pid)
        card = card_of(launch)
    assert (card.host, card.role, card.rank, card.pid) == ("host-1", "actor", 1, pid)
    assert card.cause.startswith("actor rank 1, ") and f"process {pid} is stopped since " in card.cause
    assert stopped_at - 3 < card.since < card.at
    assert card.phase.startswith("step ")
    assert any(line.startswith("actor 0 on host-0: ") for line in card.others)
    assert any(line.startswith("rollout 0 on host-2: ") for line in card.others)
    for name in ("actor-0", "actor-1", "rollout-0", "sglang-0", "reward-0", "driver"):
        assert "most recent call first" in (launch.run / "logs" / f"{name}.stacks").read_text(), name


@pytest.mark.release
def test_an_engine_that_is_stopped_is_the_cause(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *SETTINGS, *APART, cold="host")
        launch.until_in("rollout")
        pid = launch.pids(2, "sglang::scheduler")[0]
        stop(launch, 2, pid)
        card = card_of(launch)
    assert (card.host, card.role, card.rank) == ("host-2", "rollout", 0)
    assert f"process {pid} is stopped since " in card.cause


def test_a_host_whose_link_goes_down_in_a_transfer_of_weights_is_the_cause(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *SETTINGS, *APART)
        launch.until_in("sync")
        hosts[2].link_down()
        card = card_of(launch)
    assert card.host == "host-2 (10.77.0.12)"
    assert card.cause.startswith("host-2 (10.77.0.12): no sign of life since ")


@pytest.mark.release
def test_of_a_driver_that_is_killed_its_launcher_tells(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *SETTINGS, *APART)
        launch.until_in("update")
        [driver] = launch.pids(0, "hybridflow train")
        hosts[0].run(["kill", "-KILL", str(driver)], check=True)
        assert launch.wait() == [137, 137, 137], launch.outputs()
        card = read_failure(launch.run)
        assert card is not None
        assert (card.cause, card.host) == ("the driver was killed by SIGKILL", "host-0 (10.77.0.10)")
        assert "\n".join(card.lines()) in launch.output(0)
        assert launch.left() == []


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A directory with room for a part of a checkpoint."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.mark.release
def test_a_disk_that_is_full_keeps_no_run_from_going_on_and_is_named(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path):
        pass  # who may not make hosts may not mount either
    with small_disk(tmp_path / "disk") as disk, hosts_or_skip(3, shared=tmp_path) as hosts:
        saving = f"checkpoint={{dir: {disk}, save_interval: 2}}"
        launch = start_agents(hosts, tmp_path, *SETTINGS, *APART, saving, "trainer.steps=4")
        assert launch.wait() == [0, 0, 0], launch.outputs()
        assert launch.left() == []
    lines_said = [
        line for line in launch.output(0).splitlines() if line.startswith("hybridflow: the checkpoint of step ")
    ]
    assert lines_said and all(f"{disk}/step-" in line for line in lines_said), launch.outputs()
    assert all(re.search(r": actor rank \d: cannot write .*: No space left on device ", line) for line in lines_said)
