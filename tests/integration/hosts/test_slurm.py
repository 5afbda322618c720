"""`launch/slurm.sbatch` and `hybridflow launch slurm` in a real Slurm of three nodes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.hosts.test_launch import ENGINES_APART, MANY_STEPS
from tests.integration.hosts.test_ssh import secrets_seen
from tests.support.hosts import Hosts, hosts_or_skip
from tests.support.hosts.launching import LIMIT_S, Launch, environment, small_run
from tests.support.runs import ROOT
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.hosts]


@dataclass
class Job(Launch):
    """A job of Slurm. Its first node writes the output into the directory that all see."""

    number: str = ""

    def outputs(self) -> str:
        files = sorted(self.directory.glob("*.out"))
        return "\n".join(path.read_text()[-6000:] for path in files) + self.shown()

    def shown(self) -> str:
        return self.hosts[0].run(["scontrol", "show", "job", self.number]).stdout

    def field(self, name: str) -> str:
        """State of the job in Slurm."""
        results = re.search(rf"\b{name}=(\S+)", self.shown())
        return results[1] if results else ""

    def until_state(self, state: str, limit_s: float = LIMIT_S) -> None:
        self.until(lambda: self.field("JobState") == state, limit_s)

    def signal(self, *words: str) -> None:
        self.hosts[0].run(["scancel", *words, self.number], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with hosts_or_skip(3, shared=tmp_path) as made:
        made.start_slurm()
        yield made


def submitted(hosts: Hosts, directory: Path, *command: str | Path, **variables: str) -> Job:
    given = environment(directory, HYBRIDFLOW_CPU_SLOTS="4", HYBRIDFLOW_PYTHON=warm_python(), **variables)
    del given["HYBRIDFLOW_TOKEN_FILE"]
    done = hosts[0].run(command, env=given, cwd=ROOT, check=True)
    return Job(hosts, directory, number=done.stdout.split()[-1])


def by_hand(hosts: Hosts, directory: Path, *overrides: str, options: tuple[str, ...] = (), **variables: str) -> Job:
    output = f"--output={directory}/%j.out"
    words = small_run(directory, *overrides)
    sbatch = ["sbatch", "--parsable", "--nodes=3", output, *options, "launch/slurm.sbatch", *words]
    return submitted(hosts, directory, *sbatch, **variables)


def test_a_job_runs_to_its_end(hosts: Hosts, tmp_path: Path) -> None:
    job = by_hand(hosts, tmp_path, *ENGINES_APART, "placement.rollout=cpu:4,8", HYBRIDFLOW_INTERFACE="eth0")
    job.until_in("update", step=1)
    agents = hosts[1].run(["pgrep", "-af", "hybridflow agent"]).stdout
    assert "--head 10.77.0.10:" in agents  # its address there, and not its name
    assert [item for host in hosts for item in secrets_seen(host)] == []
    job.until_state("COMPLETED")
    lines = job.outputs().splitlines()
    assert any(re.match(r"0: train 3/3  reward ", line) for line in lines), job.outputs()
    assert job.field("ExitCode") == "0:0"
    assert job.left() == []


@pytest.mark.release
def test_the_command_submits_a_job(hosts: Hosts, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybridflow", "launch", "slurm"]
    words = [*small_run(tmp_path, "trainer.steps=1", "warmup=null", "placement.actor=node:1", "train.layout.ep=4")]
    given = ["--nodes", "2", "--role", "rollout=1", "--role", "train=1", "--time", "10", "--cpu-slots", "4"]
    job = submitted(hosts, tmp_path, *command, *words[:1], *given, *words[1:], SBATCH_OUTPUT=f"{tmp_path}/%x.out")
    job.until(lambda: job.field("JobState") in ("COMPLETED", "FAILED"))
    assert (job.field("JobState"), job.field("NumNodes"), job.field("TimeLimit")) == ("COMPLETED", "2", "00:10:00")
    assert job.field("JobName") == "hybridflow-small"
    assert "train 1/1  reward " in (tmp_path / "hybridflow-small.out").read_text()
    assert job.left() == []


def test_a_job_that_is_to_make_room_is_queued_again_and_resumes(hosts: Hosts, tmp_path: Path) -> None:
    job = by_hand(hosts, tmp_path, *MANY_STEPS, "checkpoint={save_interval: 100000, on_stop_s: 40}")
    job.until_in("update", step=3)
    job.signal("--batch", "--signal=USR1")
    job.until(lambda: "SIGUSR1: the run saves a checkpoint after this step" in job.outputs())
    job.signal("--batch", "--signal=TERM")  # as Slurm does before the time limit
    job.until(lambda: job.field("Restarts") == "1")
    assert job.left() == [], job.outputs()
    assert f"slurm.sbatch: job {job.number} is queued again" in job.outputs()
    # Slurm keeps a job that was queued again for two minutes. Nodes refuse one whose credential is of the second in
    # which they revoked the one before it.
    job.until_state("PENDING")
    time.sleep(2)
    hosts[0].run(["scontrol", "update", f"JobId={job.number}", "StartTime=now"], check=True)
    job.until_state("RUNNING")
    job.until(lambda: re.search(r"^0: resume: after step \d+", job.outputs(), re.MULTILINE) is not None)
    job.signal()
    job.until_state("CANCELLED")
    job.until(lambda: job.left() == [])  # Slurm kills all of it, and what watches over it tidies up after that
    assert job.field("Restarts") == "1"


@pytest.mark.release
def test_a_job_that_is_cancelled_is_not_queued_again(hosts: Hosts, tmp_path: Path) -> None:
    job = by_hand(hosts, tmp_path, *MANY_STEPS)
    job.until_in("update")
    job.signal()
    job.until_state("CANCELLED")
    assert job.left() == [], job.outputs()
    assert job.field("Restarts") == "0"
    assert "queued again\n" not in job.outputs().replace("not queued again", "")


@pytest.mark.release
def test_a_failure_has_its_exit_code(hosts: Hosts, tmp_path: Path) -> None:
    job = by_hand(hosts, tmp_path, "seed=none")
    job.until_state("FAILED")
    assert job.field("ExitCode") == "2:0", job.outputs()
    assert job.left() == []


@pytest.mark.parametrize(
    ("recipe", "variables", "said"),
    [
        ("none.yaml", {}, "no recipe none.yaml in "),
        ("launch/recipes/demo.yaml", {"HYBRIDFLOW_ROLES": "train"}, "1 roles for 3 nodes (train): expected one for"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    hosts: Hosts, tmp_path: Path, recipe: str, variables: dict[str, str], said: str
) -> None:
    output = f"--output={tmp_path}/%j.out"
    sbatch = ["sbatch", "--parsable", "--nodes=3", output, "launch/slurm.sbatch", recipe]
    job = submitted(hosts, tmp_path, *sbatch, **variables)
    job.until_state("FAILED")
    assert f"slurm.sbatch: {said}" in job.outputs()
    assert job.field("ExitCode") == "2:0"


@pytest.mark.release
def test_a_spare_node_takes_the_place_of_one_that_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    settings = ["warmup=null", "trainer.steps=5", "checkpoint.save_interval=2", "placement.rollout=cpu:4,5"]
    job = by_hand(
        hosts, tmp_path, *settings, options=("--no-kill",), HYBRIDFLOW_MAX_RESTARTS="2", HYBRIDFLOW_SPARES="1"
    )
    job.until_in("update", step=3)
    [agent] = job.pids(1, "hybridflow agent")
    hosts[1].run(["kill", "-KILL", str(agent)], check=True)
    job.until_state("COMPLETED")
    assert "host-2 (10.77.0.12) takes the place of host-1 (10.77.0.11)" in job.outputs()
    assert job.field("ExitCode") == "0:0"
    assert job.left() == []
