"""A run that loses a host is started again: with one that has stood by, or on those that are left."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybridflow.rundir.status.first_failure import read_earlier, read_failure
from tests.integration.hosts.test_launch import learned
from tests.support.hosts import Hosts, hosts_or_skip
from tests.support.hosts.launching import LIMIT_S, Launch, agent_command, small_run, start
from tests.support.runs import records, run

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

SETTINGS = [
    "warmup=null",
    "trainer.steps=6",
    "evaluation.eval.before_train=false",
    "checkpoint.save_interval=2",
    "limits.host_s=8",
    "limits.stop_s=5",
]


def start_with(hosts: Hosts, directory: Path, *overrides: str, spares: int, **options: Any) -> Launch:
    words = small_run(directory, *SETTINGS, *overrides)
    roles = options.pop("roles", [None] * len(hosts))
    return start(
        hosts,
        directory,
        lambda index: agent_command(
            index,
            len(hosts),
            *words,
            restarts=3,
            spares=spares,
            role=roles[index],
            **options,
        ),
    )


@pytest.mark.parametrize("loss", ["link", pytest.param("agent", marks=pytest.mark.release)])
def test_a_spare_takes_the_place_of_a_lost_host_and_nothing_is_lost(tmp_path: Path, loss: str) -> None:
    apart = ["placement.actor=cpu:0-1", "placement.rollout=cpu:4,5"]
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_with(hosts, tmp_path, *apart, spares=1)
        launch.until_in("update", 4)
        # No more than its agent, and that which has forked it.
        commands = [process.command for process in launch.hosts[2].processes()]
        assert all("hybridflow agent" in command or "warm.server driver" in command for command in commands), commands
        if loss == "link":
            hosts[1].link_down()
        else:
            launch.processes[1].kill()
        assert launch.wait() == [0, 1 if loss == "link" else -signal.SIGKILL, 0], launch.outputs()
        assert launch.left() == []
    said = launch.output(0)
    lines_said = [line for line in said.splitlines() if "starting the run again" in line]
    assert len(lines_said) == 1 and re.search(
        r"\(1 of 3\), after: host-1 \(10.77.0.11\): .*; host-2 \(10.77.0.12\) takes the place of host-1 "
        r"\(10.77.0.11\); restarts left: 2$",
        lines_said[0],
    ), launch.outputs()
    assert [record["step"] for record in records(launch.run, "train")] == [1, 2, 3, 4, 5, 6]
    [earlier] = read_earlier(launch.run)
    assert earlier.cause.startswith("host-1 (10.77.0.11): ") and read_failure(launch.run) is None
    one = tmp_path / "one"
    one.mkdir()
    done = run(one, *SETTINGS, "placement.actor=cpu:0-1", "placement.rollout=cpu:2-3")
    assert done.returncode == 0, done.stderr
    assert learned(launch.run) == learned(one / "small")


@pytest.mark.release
def test_without_a_spare_it_goes_on_with_the_hosts_of_a_role_that_are_left(tmp_path: Path) -> None:
    devices = "placement={actor: 'cpu:0-1', rollout: 'role:rollout'}"
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_with(hosts, tmp_path, devices, spares=0, roles=[None, "rollout", "rollout"], slots=2)
        launch.until_in("update", 4)
        launch.processes[1].kill()
        assert launch.wait() == [0, -signal.SIGKILL, 0], launch.outputs()
        assert launch.left() == []
    assert "the run goes on with 2 of 3 hosts; restarts left: 2" in launch.output(0)
    assert [record["step"] for record in records(launch.run, "train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.release
@pytest.mark.parametrize("spares", [0, 1])
def test_a_trainer_that_loses_one_of_its_two_hosts_goes_on(tmp_path: Path, spares: int) -> None:
    devices = "placement={actor: 'role:train', rollout: 'role:rollout'}"
    roles = ["train", "train", "rollout", *["train"] * spares]
    with hosts_or_skip(len(roles), shared=tmp_path) as hosts:
        launch = start_with(hosts, tmp_path, devices, "train.layout={}", spares=spares, roles=roles, slots=1)
        launch.until_in("update", 4)
        assert launch.logs_to(1, "actor-1")
        launch.processes[1].kill()
        assert launch.wait() == [0, -signal.SIGKILL, *[0] * (len(roles) - 2)], launch.outputs()
        assert launch.left() == []
    lines_said = [line for line in launch.output(0).splitlines() if "starting the run again" in line]
    assert len(lines_said) == 1, launch.outputs()
    assert ("host-3 (10.77.0.13) takes the place of host-1" in lines_said[0]) == bool(spares)
    assert ("the run goes on with 2 of 3 hosts" in lines_said[0]) == (not spares)
    assert [record["step"] for record in records(launch.run, "train")] == [1, 2, 3, 4, 5, 6]


def ended_by(launch: Launch, deadline: float) -> None:
    """Wait until no more than torchrun is there on the hosts that are up."""
    while any(
        "torch.distributed.run" not in process.command
        for host in launch.hosts
        if host.is_up
        for process in host.processes()
    ):
        assert time.monotonic() < deadline, launch.outputs()
        time.sleep(0.1)


@pytest.mark.release
def test_a_spare_that_torchrun_has_started_takes_the_place_of_a_host_without_power(tmp_path: Path) -> None:
    words = small_run(tmp_path, *SETTINGS, "placement.actor=cpu:0-1", "placement.rollout=cpu:4,5")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "1"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host-0:29500", "--rdzv-id", "run"]
    options = ["--cpu-slots", "4", "--max-restarts", "1", "--spares", "1"]
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start(hosts, tmp_path, lambda _: [*torchrun, *rendezvous, "launch/torchrun.py", *options, *words])
        launch.until_in("update", 4)
        hosts[1].power_off()
        assert launch.processes[1].wait(120) == -signal.SIGKILL
        ended_by(launch, time.monotonic() + LIMIT_S)
        assert [launch.processes[host].poll() for host in (0, 2)] == [None, None]  # torchrun waits for the lost one
        for host in (0, 2):
            launch.processes[host].kill()
            launch.processes[host].wait()
        assert launch.left() == []
    assert "host-2 (10.77.0.12) takes the place of host-1 (10.77.0.11)" in launch.output(0)
    assert [record["step"] for record in records(launch.run, "train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.release
def test_what_does_not_fit_on_the_hosts_that_are_left_ends_the_run(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_with(hosts, tmp_path, "placement.actor=cpu:0-1", "placement.rollout=cpu:4,8", spares=0)
        launch.until_in("update", 2)
        hosts[2].link_down()
        assert launch.wait() == [1, 1, 1], launch.outputs()
        assert launch.left() == []
    said = launch.output(0)
    assert re.search(
        r"hybridflow: the run was not started on the hosts that are left: placement.rollout: .*there is no cpu:8", said
    ), launch.outputs()
    assert "hybridflow: the failure before: host-2 (10.77.0.12): no sign of life since " in said
    card = read_failure(launch.run)
    assert card is not None and card.cause.startswith("host-2 (10.77.0.12): no sign of life since ")
