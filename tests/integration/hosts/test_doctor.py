"""Refusals of hosts before the run begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.hosts import hosts_or_skip
from tests.support.hosts.launching import PORT, Launch, agent_command, environment, small_run, start
from tests.support.runs import ROOT
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.hosts]


def doctor_command(index: int, hosts: int, words: Sequence[str], *options: str) -> list[str]:
    at_ = ["--host", str(index), "--hosts", str(hosts), "--head", f"host-0:{PORT}", *options]
    return [warm_python(), "-m", "hybridflow", "agent", *at_, "doctor", *words]


def refused(launch: Launch, *lines: str) -> None:
    """On all hosts with exit code 2, before anything of the run is there."""
    assert launch.wait() == [2] * len(launch.hosts), launch.outputs()
    for host in range(len(launch.hosts)):
        for line in lines:
            assert f"hybridflow: {line}" in launch.output(host), launch.outputs()
    assert not launch.run.exists()
    assert launch.left() == []


def test_the_doctor_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        words = small_run(tmp_path)
        launch = start(hosts, tmp_path, lambda index: doctor_command(index, 3, words))
        assert launch.wait() == [0, 0, 0], launch.outputs()
        said = launch.output(0)
        assert "3 hosts alike in all " in said
        assert "hosts: round trip of 6 pairs: " in said
        assert "hosts: gloo, GB/s of " in said
        assert 'GLOO_SOCKET_IFNAME=eth0 (interface eth0), NCCL_SOCKET_IFNAME="=eth0" (interface eth0)' in said
        assert launch.left() == [] and not launch.run.exists()


def test_another_version_and_another_clock_are_named(tmp_path: Path) -> None:
    other, fast = tmp_path / "other", tmp_path / "fast"
    (other / "ray-2.1.0.dist-info").mkdir(parents=True)
    (other / "ray-2.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.1.0\n")
    fast.mkdir()
    # The clock of all hosts of a test is this machine's.
    (fast / "sitecustomize.py").write_text("import time\nright = time.time\ntime.time = lambda: right() + 40\n")
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        words = small_run(tmp_path)
        for path, line in (
            (other, f"hosts: ray: {version('ray')} on host-0; 2.1.0 on host-1"),
            (fast, "hosts: clock: 40.0 s ahead of host 0's on host-1"),
        ):

            def given(index: int, path: Path = path) -> dict[str, str]:
                return environment(tmp_path, **({"PYTHONPATH": f"{path}:{ROOT}"} if index == 1 else {}))

            def command(index: int) -> list[str]:
                return agent_command(index, 2, *words, python=sys.executable if index == 1 else None)

            refused(start(hosts, tmp_path, command, given), line)


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
        assert launch.wait() == [2, 2], launch.outputs()
        assert "hybridflow: hosts: recipe: " in launch.output(0)


def test_an_interface_of_the_recipe_and_a_directory_that_hosts_do_not_share_are_named_with_ipv6(tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    for directory in (private, shared):
        directory.mkdir()
    with hosts_or_skip(2, shared=shared, private=[private], ipv6=True) as hosts:
        words = small_run(private / "runs", "network.interface=eth0", "network.preset=ethernet")
        launch = start(hosts, shared, lambda index: doctor_command(index, 2, words))
        assert launch.wait() == [0, 0], launch.outputs()
    said = launch.output(0)
    assert "host-1 (fd77::11)" in said and "NCCL_SOCKET_FAMILY=AF_INET6 (interface eth0)" in said
    assert "NCCL_IB_DISABLE=1 (preset ethernet)" in said
    lines_said = (
        f"hybridflow: hosts: run_dir: another directory at {private} (tmpfs) on host-1; expected the directory that "
    )
    assert lines_said in said


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
        assert launch.wait() == codes, launch.outputs()
        assert all(line in launch.output(host) for host in range(2)), launch.outputs()


def test_hosts_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    with hosts_or_skip(3, shared=tmp_path) as hosts:
        for host, other in ((1, 2), (2, 1)):
            hosts[host].configure_network(["ip", "route", "add", "unreachable", f"{hosts[other].address}/32"])
        words = small_run(tmp_path)
        launch = start(hosts, tmp_path, lambda index: doctor_command(index, 3, words))
        refused(launch, "hosts: host-1 (10.77.0.11) and host-2 (10.77.0.12) do not reach each other: ")
