"""A Ray cluster that somebody else has started on several hosts: its nodes are looked at, and have roles by label."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, hosts_or_skip
from tests.support.hosts.launching import Launch, environment, small_run
from tests.support.runs import ROOT, records
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

RAY = Path(sys.executable).parent / "ray"
PORT = 6379
CLUSTER = f"placement.cluster=host-0:{PORT}"
ROLES = ["placement.actor=role:train", "placement.rollout=role:rollout"]


def with_token(directory: Path, **changes: str) -> dict[str, str]:
    """The environment of `ray start` and of `hybridflow`, on every host."""
    given = environment(
        directory, RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="300", **changes
    )
    return given | {"RAY_AUTH_TOKEN_PATH": given.pop("HYBRIDFLOW_TOKEN_FILE")}


def start_cluster(hosts: Hosts, directory: Path, roles: Sequence[str]) -> None:
    """`ray start` on every host, as a user does; each has four CPU slots."""
    for index, (host, role) in enumerate(zip(hosts, roles, strict=True)):
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"] if index == 0 else [f"--address=host-0:{PORT}"]
        )
        options = ["--num-cpus=4", f"--node-ip-address={host.address}", f"--labels=hybridflow.role={role}"]
        host.run([RAY, "start", *where, *options], env=with_token(directory), cwd="/", timeout_s=600, check=True)


def command(hosts: Hosts, directory: Path, *words: str, limit_s: float = 600) -> subprocess.CompletedProcess[str]:
    """`hybridflow` on the first host."""
    return hosts[0].run(
        [warm_python(), "-m", "hybridflow", *words], env=with_token(directory), cwd=ROOT, timeout_s=limit_s
    )


def actors(hosts: Hosts) -> list[str]:
    """Actors of the check, on all hosts."""
    return [process.command for host in hosts for process in host.processes() if "NodeActor" in process.command]


def test_roles_by_label(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        start_cluster(hosts, tmp_path, ["train", "rollout"])
        done = command(hosts, tmp_path, "train", *small_run(tmp_path, CLUSTER, *ROLES, "trainer.steps=1"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "hosts: round trip of 2 pairs: " in done.stdout
        assert "hosts: gloo, GB/s of " in done.stdout
        assert len(records(Launch(hosts, tmp_path).run, "train")) == 1
        wrong = command(
            hosts, tmp_path, "train", *small_run(tmp_path, CLUSTER, "overwrite=true", "placement.actor=role:reward")
        )
        assert wrong.returncode == 2
        assert "the cluster (2 nodes) has rollout, train" in wrong.stderr
        joined = small_run(tmp_path, "placement.cluster=ray://host-0:10001", *ROLES)
        # Ray gives the server of a client 30 s to start, too few for a busy machine, and stumbles over one that ended.
        for _ in range(8):
            client = command(hosts, tmp_path, "doctor", *joined)
            if not re.search("Starting Ray client server failed|psutil.ZombieProcess", client.stderr):
                break
        assert client.returncode == 0, client.stdout + client.stderr
        assert "2 hosts alike in 24 of 25 facts" in client.stdout
        deadline = time.monotonic() + 180
        while left := actors(hosts):  # Ray ends those of a client after it
            assert time.monotonic() < deadline, left
            time.sleep(0.5)


@pytest.mark.release
def test_a_node_that_differs_is_refused(tmp_path: Path) -> None:
    metadata = Path(str(distribution("torch").locate_file(f"torch-{version('torch')}.dist-info/METADATA")))
    other = tmp_path / "METADATA"
    other.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        hosts[2].run(["mount", "--bind", other, metadata], check=True)
        start_cluster(hosts, tmp_path, ["train", "train", "rollout"])
        words = small_run(tmp_path, CLUSTER, *ROLES)
        for name in ("train", "doctor"):
            done = command(hosts, tmp_path, name, *words)
            assert done.returncode == 2, done.stdout + done.stderr
            assert re.search(r"^hybridflow: hosts: torch: \S+ on host-0, host-1; 2\.1\.0 on host-2$", done.stderr, re.M)
            assert re.search(r"^host-2 .*2\.1\.0", done.stdout, re.M), done.stdout
        assert actors(hosts) == []
        assert not Launch(hosts, tmp_path).run.exists()


@pytest.mark.release
def test_a_node_without_the_code_is_named(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        start_cluster(hosts, tmp_path, ["train", "rollout"])
        hosts[1].run(["mount", "-t", "tmpfs", "none", ROOT / "hybridflow"], check=True)
        done = command(hosts, tmp_path, "train", *small_run(tmp_path, CLUSTER, *ROLES))
        assert done.returncode == 2, done.stdout + done.stderr
        assert re.search(r"^hybridflow: hosts: host-1 \(10\.\S+\): ModuleNotFoundError: No module named", done.stderr)


@pytest.mark.release
def test_a_pod_that_has_to_go_lets_the_run_save(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        start_cluster(hosts, tmp_path, ["train", "rollout"])
        launch = Launch(hosts, tmp_path)
        saving = ["trainer.steps=1000", "checkpoint.save_interval=500", "checkpoint.on_stop_s=60"]
        words = small_run(tmp_path, CLUSTER, *ROLES, *saving)
        with (tmp_path / "output-0").open("w") as output:
            train = [sys.executable, "-m", "hybridflow", "train", *words]
            given = with_token(tmp_path)
            launch.processes.append(hosts[0].start(train, env=given, cwd=ROOT, stdout=output, stderr=output))
        (tmp_path / "output-1").touch()
        launch.until_in("rollout", step=2)
        stop = [sys.executable, "-P", "-m", "hybridflow.cluster.ray.stop_driver", "120"]
        # Pods that go together each ask.
        with (tmp_path / "other-pod").open("w") as other:
            beside = hosts[0].start(stop, env=with_token(tmp_path), cwd="/tmp", stdout=other, stderr=other)
            time.sleep(2)
            done = hosts[1].run(stop, env=with_token(tmp_path), cwd="/tmp", timeout_s=200)
            beside.wait(100)
        assert done.returncode == 0 and done.stdout.startswith("the driver is to end: pid "), done.stdout + done.stderr
        assert launch.wait() == [75], launch.outputs()
        assert list((launch.run / "checkpoints").glob("step-*"))
        again = hosts[1].run(stop, env=with_token(tmp_path), cwd="/tmp", timeout_s=100)
        assert (again.returncode, again.stdout) == (0, "no driver\n")
