"""What a launch finds wrong with its hosts before the run begins, and how it says so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hosts import hosts_or_skip
from tests.support.hosts.launching import PORT, Launch, agent_command, environment, small_run, start
from tests.support.runs import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.hosts]


def doctor_command(index: int, hosts: int, words: Sequence[str], *options: str) -> list[str]:
    place = ["--host", str(index), "--hosts", str(hosts), "--head", f"host-0:{PORT}", *options]
    return [sys.executable, "-m", "hybridflow", "agent", *place, "doctor", *words]


def refused(launch: Launch, *lines: str) -> None:
    """On all hosts with exit code 2, before anything of the run is there."""
    assert launch.wait(60) == [2] * len(launch.hosts), launch.outputs()
    for host in range(len(launch.hosts)):
        for line in lines:
            assert f"hybridflow: {line}" in launch.output(host), launch.outputs()
    assert not launch.run.exists()
    assert launch.left() == []


def test_the_doctor_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path)
        launch = start(hosts, tmp_path, lambda index: doctor_command(index, 3, words))
        assert launch.wait(60) == [0, 0, 0], launch.outputs()
        said = launch.output(0)
        assert "3 hosts alike in all " in said
        assert "hosts: round trip of 6 pairs: " in said
        assert "hosts: gloo, GB/s of " in said
        assert 'GLOO_SOCKET_IFNAME=eth0 (interface eth0), NCCL_SOCKET_IFNAME="=eth0" (interface eth0)' in said
        assert launch.left() == [] and not launch.run.exists()


def test_another_version_and_another_clock_are_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "ray-2.1.0.dist-info").mkdir(parents=True)
    (other / "ray-2.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.1.0\n")
    # The clock of all hosts of a test is this machine's.
    (other / "sitecustomize.py").write_text("import time\nright = time.time\ntime.time = lambda: right() + 40\n")
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path)

        def given(index: int) -> dict[str, str]:
            return environment(tmp_path, **({"PYTHONPATH": f"{other}:{ROOT}"} if index == 2 else {}))

        launch = start(hosts, tmp_path, lambda index: agent_command(index, 3, *words), given)
        refused(launch, "hosts: ray: 2.", "hosts: clock: 40.0 s ahead of host 0's on host-2")
        assert "on host-0, host-1; 2.1.0 on host-2" in launch.output(0)


def test_another_recipe_is_named(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        for index in range(2):
            (tmp_path / f"recipe-{index}.yaml").write_text(f"base: {ROOT}/launch/recipes/demo.yaml\nseed: {index}\n")
        (tmp_path / "one.yaml").symlink_to(tmp_path / "recipe-0.yaml")

        def words(index: int) -> list[str]:
            # One path, behind which hosts have different files.
            return [str(tmp_path / "link" / "recipe.yaml"), *small_run(tmp_path)[1:]]

        for index, host in enumerate(hosts):
            host.run(["mkdir", "-p", "/tmp/recipes"], check=True)
            host.run(["cp", str(tmp_path / f"recipe-{index}.yaml"), "/tmp/recipes/recipe.yaml"], check=True)
        (tmp_path / "link").symlink_to("/tmp/recipes")
        launch = start(hosts, tmp_path, lambda index: agent_command(index, 2, *words(index)))
        assert launch.wait(60) == [2, 2], launch.outputs()
        assert "hybridflow: hosts: recipe: " in launch.output(0)


def test_a_directory_of_runs_that_hosts_do_not_share_is_named(tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    for directory in (private, shared):
        directory.mkdir()
    with hosts_or_skip(2, shared=shared, private=[private]) as hosts:
        words = [small_run(shared)[0], f"run_dir={private}/runs", *small_run(shared)[2:]]
        launch = start(hosts, shared, lambda index: doctor_command(index, 2, words))
        assert launch.wait(60) == [0, 0], launch.outputs()
    told = f"hybridflow: hosts: run_dir: another directory at {private} (tmpfs) on host-1; expected the directory that "
    assert told in launch.output(0)


@pytest.mark.parametrize(
    ("name", "codes", "line"),
    [
        ("eth7", [2, 2], "no interface 'eth7' on this host; it has eth0 (10.77.0.1"),
        ("lo", [2, 2], "--interface lo (127.0.0.1): other hosts do not reach it; expected one of the cluster's"),
    ],
)
def test_a_wrong_interface_is_named_at_once(tmp_path: Path, name: str, codes: list[int], line: str) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path)
        launch = start(hosts, tmp_path, lambda index: doctor_command(index, 2, words, "--interface", name))
        assert launch.wait(60) == codes, launch.outputs()
        assert all(line in launch.output(host) for host in range(2)), launch.outputs()


def test_an_interface_of_the_recipe_is_taken_also_with_ipv6(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path, ipv6=True) as hosts:
        words = small_run(tmp_path, "network.interface=eth0", "network.preset=ethernet")
        launch = start(hosts, tmp_path, lambda index: doctor_command(index, 2, words))
        assert launch.wait(60) == [0, 0], launch.outputs()
        said = launch.output(0)
        assert "host-1 (fd77::11)" in said and "NCCL_SOCKET_FAMILY=AF_INET6 (interface eth0)" in said
        assert "NCCL_IB_DISABLE=1 (preset ethernet)" in said


def test_hosts_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        for host, other in ((1, 2), (2, 1)):
            hosts[host].configure_network(["ip", "route", "add", "unreachable", f"{hosts[other].address}/32"])
        words = small_run(tmp_path)
        launch = start(hosts, tmp_path, lambda index: doctor_command(index, 3, words))
        refused(launch, "hosts: host-1 (10.77.0.11) and host-2 (10.77.0.12) do not reach each other: ")
