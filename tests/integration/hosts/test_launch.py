"""Runs on three hosts: what they learn, what listens, and how they end when something on one of them does."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from hybridflow.rundir.status.first_failure import read_failure
from tests.support.hosts import hosts_or_skip
from tests.support.hosts.host import Host
from tests.support.hosts.launching import (
    Launch,
    agent_command,
    environment,
    learned,
    small_run,
    start,
    start_agents,
)
from tests.support.runs import ROOT, records, run
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

ENGINES_APART = ["trainer.steps=3", "placement.actor=cpu:0-1"]
"""The trainer on the first host; where the engines are is said beside it."""
MANY_STEPS = [
    "warmup=null",
    "trainer.steps=1000",
    "evaluation.eval.before_train=false",
    "placement.actor=cpu:0-1",
    "placement.rollout=cpu:4,8",
    "limits.host_s=8",
    "limits.stop_s=5",
]


def test_torchrun_on_three_hosts_learns_what_one_host_learns(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path, *ENGINES_APART, "placement.rollout=cpu:4,8")
        torchrun = [warm_python(), "-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "2"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host-0:29500", "--rdzv-id", "run"]
        command = [*torchrun, *rendezvous, "launch/torchrun.py", "--cpu-slots", "4", *words]
        launch = start(hosts, tmp_path, lambda _: command)
        assert launch.wait() == [0, 0, 0], launch.outputs()
        assert launch.left() == []
    one = tmp_path / "one"
    one.mkdir()
    done = run(one, *ENGINES_APART, "placement.rollout=cpu:2-3")
    assert done.returncode == 0, done.stderr
    results = learned(launch.run)
    assert sum("train/gradient_norm" in record for record in results) == 3
    assert results == learned(one / "small")


@pytest.mark.release
@pytest.mark.parametrize("victim", [0, 1])
def test_a_torchrun_that_is_killed_ends_the_run_on_all_hosts(tmp_path: Path, victim: int) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path, *MANY_STEPS, "placement.rollout=cpu:4")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host-0:29500", "--rdzv-id", "run"]
        launch = start(
            hosts, tmp_path, lambda _: [*torchrun, *rendezvous, "launch/torchrun.py", "--cpu-slots", "4", *words]
        )
        launch.until_in("update")
        launch.processes[victim].kill()
        codes = launch.wait()
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] != 0, launch.outputs()
        assert launch.left() == []


def test_hosts_have_roles(tmp_path: Path) -> None:
    roles, slots = ["train", "rollout", "reward"], [2, 1, 1]
    devices = "placement={actor: 'role:train', rollout: 'role:rollout', reward: 'role:reward'}"
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "trainer.steps=1", "warmup=null", devices)
        launch = start(
            hosts, tmp_path, lambda index: agent_command(index, 3, *words, role=roles[index], slots=slots[index])
        )
        launch.until_in("rollout", 1)
        where = [
            [log for log in ("actor-1", "rollout-0", "reward-0") if launch.logs_to(host, log)] for host in range(3)
        ]
        assert launch.wait() == [0, 0, 0], launch.outputs()
        assert where == [["actor-1"], ["rollout-0"], ["reward-0"]]
        assert launch.left() == []
        wrong = small_run(tmp_path, "overwrite=true", "placement.actor=cpu:1-2")
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 3, *wrong, role=roles[index], slots=2))
        assert launch.wait() == [2, 2, 2], launch.outputs()
        assert "placement.actor: cpu 0 of host-1, whose role is rollout" in launch.output(0)


def status_of_ray(host: Host, directory: Path) -> str:
    """Output of `ray status`, asked as docs/multi_node.md says."""
    lines = [line.strip() for line in (ROOT / "docs/multi_node.md").read_text().splitlines()]
    words = [line for line in lines if line.startswith("cd /tmp/hf-ray-") or "ray status --address" in line]
    command = ["bash", "-c", " && ".join(words).replace("XXXXXXXX", "*")]
    return host.run(command, env=environment(directory), check=True).stdout


def ends_with(launch: Launch, *, codes: list[int], lines_said: str) -> None:
    assert launch.wait() == codes, launch.outputs()
    said = (line for line in launch.output(0).splitlines() if line.startswith("hybridflow: "))
    first = next(line for line in said if "no answer since" not in line)  # a start on a busy machine
    assert lines_said in first, launch.outputs()
    card = read_failure(launch.run)
    assert card is not None and f"hybridflow: {card.cause}" == first, launch.outputs()
    assert launch.left() == []


@pytest.mark.release
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_host_whose_link_goes_down_is_named_and_the_run_ends_on_all(tmp_path: Path, phase: str) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS)
        launch.until_in(phase)
        hosts[2].link_down()
        ends_with(launch, codes=[1, 1, 1], lines_said="host-2 (10.77.0.12): no sign of life since ")
        assert "host 0 (host-0) gives no sign of life since " in launch.output(2)


@pytest.mark.release
def test_an_agent_that_is_killed_ends_the_run_on_all_hosts(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS)
        launch.until_in("update")
        launch.processes[1].kill()
        ends_with(launch, codes=[1, -signal.SIGKILL, 1], lines_said="host-1 (10.77.0.11): its agent is gone")


@pytest.mark.release
def test_without_the_first_host_the_others_end(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS)
        launch.until_in("update")
        hosts[0].power_off()
        assert launch.wait()[1:] == [1, 1]
        for other in (1, 2):
            assert "hybridflow: host 0 (host-0) gives no sign of life since " in launch.output(other)
        assert launch.left() == []


@pytest.mark.release
def test_the_agent_of_the_first_host_is_killed(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS)
        launch.until_in("update")
        launch.processes[0].kill()
        assert launch.wait() == [-signal.SIGKILL, 1, 1], launch.outputs()
        assert "hybridflow: the launcher of this run is gone" in launch.output(0)
        for other in (1, 2):
            assert "hybridflow: host 0 (host-0) is gone: " in launch.output(other)
        assert launch.left() == []


@pytest.mark.parametrize(
    ("host", "number"), [pytest.param(0, signal.SIGINT, marks=pytest.mark.release), (2, signal.SIGTERM)]
)
def test_a_signal_on_any_host_ends_the_run_on_all(tmp_path: Path, host: int, number: signal.Signals) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS)
        launch.until_in("update")
        active = status_of_ray(hosts[0], tmp_path).partition("Active:")[2].partition("Pending:")[0]
        assert len(re.findall(r"1 node_\w+", active)) == 3, active
        launch.processes[host].send_signal(number)
        code = 128 + number
        assert launch.wait() == [code, code, code], launch.outputs()
        assert launch.left() == []


@pytest.mark.release
def test_a_run_with_ipv6_alone(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path, ipv6=True) as hosts:
        launch = start_agents(hosts, tmp_path, "trainer.steps=2", "warmup=null", "placement.rollout=cpu:4")
        assert launch.wait() == [0, 0], launch.outputs()
        assert "2 hosts after" in launch.output(0) and "host-1 (fd77::11)" in launch.output(0)
        assert len(records(launch.run, "train")) == 2
        assert launch.left() == []


@pytest.mark.release
def test_hosts_that_are_preempted_save_and_end_with_the_code_to_start_again(tmp_path: Path) -> None:
    saving = "checkpoint={save_interval: 100000, on_stop_s: 40}"
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS, saving)
        launch.until_in("rollout", 3)
        status = hosts[1].run([sys.executable, "-m", "hybridflow", "status", launch.run], cwd=ROOT, check=True).stdout
        assert re.match(rf"{launch.run}: running; step \d+ of 1000, \w+ for \d+ s\ntrain \d+/1000  reward ", status)
        launch.processes[2].send_signal(signal.SIGTERM)
        time.sleep(0.5)  # a scheduler takes its time
        while any(process.poll() is None for process in launch.processes):
            for process in launch.processes:  # and says it again, also to one that is about to exit
                process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert launch.wait() == [75, 75, 75], launch.outputs()
        assert re.search(r"hybridflow: terminated; the checkpoint of step \d+ is whole", launch.output(0))
        assert len(list((launch.run / "checkpoints").glob("step-*"))) == 1
        assert launch.left() == []


def test_a_rank_that_raises_on_another_host_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(generated_texts):\n    raise ValueError('no figure')\n")
    reward = f'reward.functions=[{{name: broken, path: "{tmp_path}/broken.py:score"}}]'
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, *MANY_STEPS, reward, "placement.reward=cpu:9")
        ends_with(launch, codes=[1, 1, 1], lines_said="reward rank 0, score: ")
        assert "raised ValueError at " in launch.output(0) and ": no figure on sample 0 " in launch.output(0)


@pytest.mark.release
@pytest.mark.parametrize("victim", ["actor", "rollout"])
def test_a_rank_that_is_killed_is_the_cause(tmp_path: Path, victim: str) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        devices = {"actor": "cpu:0,4", "rollout": "cpu:8"}
        launch = start_agents(hosts, tmp_path, *MANY_STEPS, *(f"placement.{role}={at}" for role, at in devices.items()))
        launch.until_in("update")
        host, log = (1, "actor-1") if victim == "actor" else (2, "rollout-0")
        launch.kill_rank(host, log)
        ends_with(launch, codes=[1, 1, 1], lines_said=f"{victim} rank {log[-1]}, ")
        assert "the process died without a word" in launch.output(0).split("hybridflow: ")[1]


@pytest.mark.release
def test_a_run_that_fails_is_started_again_and_ends_well(tmp_path: Path) -> None:
    settings = ["trainer.steps=10", "warmup=null", "checkpoint.save_interval=1", "placement.rollout=cpu:4"]
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path, *settings)
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 2, *words, restarts=3))
        for step, host, victim in ((1, 1, "RankProcess"), (5, 0, "hybridflow train")):
            complete = launch.run / "checkpoints" / f"step-{step:08d}" / "manifest.json"
            launch.until(complete.exists)
            hosts[host].run(["kill", "-KILL", str(launch.pids(host, victim)[0])], check=True)
        assert launch.wait() == [0, 0], launch.outputs()
        said = launch.output(0)
        assert re.search(r"hybridflow: starting the run again \(1 of 3\), after: (rollout|reward) rank 0, ", said)
        assert "hybridflow: starting the run again (2 of 3), after: the driver ended with 137" in said
        assert said.count("resume: after step ") == 2
        assert [record["step"] for record in records(launch.run, "train")] == list(range(1, 11))
        assert launch.left() == []


@pytest.mark.release
def test_a_run_that_fails_of_the_same_again_is_not_started_any_more(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(generated_texts):\n    raise ValueError('no figure 42')\n")
    reward = f'reward.functions=[{{name: broken, path: "{tmp_path}/broken.py:score"}}]'
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "warmup=null", "evaluation.eval.before_train=false", reward)
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 2, *words, restarts=9))
        assert launch.wait() == [1, 1], launch.outputs()
        assert launch.output(0).count("starting the run again") == 1
        assert "hybridflow: the same failure in step 1 again; the run is not started any more" in launch.output(0)
        assert launch.left() == []


@pytest.mark.release
def test_a_host_that_comes_late_is_waited_for_and_one_that_comes_later_is_refused(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "trainer.steps=3", "warmup=null")

        def command(index: int) -> list[str]:
            late = f"sleep {12 * index}; " if index else ""
            return ["sh", "-c", late + shlex.join(agent_command(min(index, 1), 2, *words))]

        launch = start(hosts, tmp_path, command)
        launch.wait()
        assert [process.returncode for process in launch.processes] == [0, 0, 2], launch.outputs()
        assert "waiting for 1 of 2 hosts: host 1 (there: host-0 (10.77.0.10)), for 1" in launch.output(0)
        assert "host-2 (10.77.0.12): the run has begun without this host; it has 2" in launch.output(2)
        assert launch.left() == []


def test_two_hosts_of_one_number_are_named(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "limits.gather_s=6")
        launch = start(hosts, tmp_path, lambda index: agent_command(min(index, 1), 3, *words))
        codes = launch.wait()
        assert sorted(codes) == [1, 1, 2], launch.outputs()
        assert re.search(r"host-[12] \(10.77.0.1[12]\) and host-[12] .* are both host 1", launch.output(codes.index(2)))


def test_hosts_that_do_not_come_are_named(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "limits.gather_s=3")
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 4, *words))
        assert launch.wait() == [1, 1], launch.outputs()
        assert "waiting for 2 of 4 hosts: host 2, host 3 (there: host-0 (10.77.0.10), host-1" in launch.output(0)


def test_hosts_without_the_runs_token_are_refused(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "limits.gather_s=8")
        good = environment(tmp_path)
        none = {name: value for name, value in good.items() if name != "HYBRIDFLOW_TOKEN_FILE"}
        given = [good, none, none | {"HYBRIDFLOW_TOKEN": "0" * 64}]
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 3, *words), lambda index: given[index])
        assert launch.wait() == [1, 2, 2], launch.outputs()
        assert "no token on this host" in launch.output(1)
        assert "has another token than this host" in launch.output(2)
        assert "10.77.0.12 was refused: it has another token" in launch.output(0)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path, "limits.gather_s=3")
        taking = (
            "import socket, time; s = socket.create_server(('10.77.0.10', 29400)); print(flush=True); time.sleep(60)"
        )
        holder = hosts[0].start([sys.executable, "-c", taking])
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 2, *words))
        assert launch.wait()[0] == 2, launch.outputs()
        assert "host 0 cannot listen at 10.77.0.10:29400: Address already in use" in launch.output(0)
        holder.kill()
