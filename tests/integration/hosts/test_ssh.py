"""`launch/ssh.sh` on three hosts with sshd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.hosts.test_launch import ENGINES_APART, MANY_STEPS
from tests.support.hosts import Host, Hosts, hosts_or_skip
from tests.support.hosts.launching import Launch, environment, small_run
from tests.support.runs import ROOT
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

SECRET = re.compile(rb"(?<![0-9A-Za-z])[0-9a-f]{64}(?![0-9A-Za-z])")


@dataclass
class Ssh(Launch):
    """A run of `launch/ssh.sh` on the first host."""

    @property
    def script(self) -> subprocess.Popen[str]:
        return self.processes[0]

    def errors(self) -> str:
        return (self.directory / "errors").read_text()

    def outputs(self) -> str:
        return f"{self.output(0)[-3000:]}\n--- stderr\n{self.errors()[-3000:]}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with hosts_or_skip(3, shared=tmp_path) as made:
        yield made


def started(hosts: Hosts, directory: Path, *overrides: str, lines: list[str] | None = None) -> Ssh:
    config = hosts.start_sshd()
    hostfile = directory / "hosts.txt"
    hostfile.write_text("\n".join(lines or [f"{host.name} cpu_slots=4" for host in hosts]))
    given = environment(directory)
    kept = sorted(given.keys() - {"PATH", "HYBRIDFLOW_TOKEN_FILE"})
    options = ["--ssh-config", str(config), "--python", warm_python()]
    options += [word for name in kept for word in ("--env", name)]
    with (directory / "output-0").open("w") as output, (directory / "errors").open("w") as errors:
        script = hosts[0].start(
            [ROOT / "launch/ssh.sh", *options, hostfile, *small_run(directory, *overrides)],
            env={name: value for name, value in given.items() if not name.startswith("HYBRIDFLOW_")},
            cwd=ROOT,
            stdout=output,
            stderr=errors,
        )
    return Ssh(hosts, directory, [script])


def secrets_seen(host: Host) -> list[str]:
    """Processes whose command line or environment holds what looks like a token."""
    seen = []
    for path in host.path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                results = SECRET.search((path / name).read_bytes())
            except OSError:
                continue
            if results:
                seen.append(f"{path.name}/{name}")
    return seen


def test_a_run_ends_with_0_and_every_line_names_its_host(hosts: Hosts, tmp_path: Path) -> None:
    launch = started(hosts, tmp_path, *ENGINES_APART, "placement.rollout=cpu:4,8")
    launch.until_in("update", step=1)
    assert [item for host in hosts for item in secrets_seen(host)] == []
    shown = hosts[1].start(["sleep", "60"], env={"SECRET": "0" * 64})
    assert secrets_seen(hosts[1]), "the check finds nothing"
    shown.kill()
    shown.wait()
    assert launch.wait() == [0], launch.outputs()
    lines = launch.output(0).splitlines()
    assert any(re.match(r"host-0: train 3/3  reward ", line) for line in lines), launch.outputs()
    assert all(re.match(r"host-[012]: ", line) for line in [*lines, *launch.errors().splitlines()]), launch.outputs()
    assert launch.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.release)])
def test_a_signal_ends_all_hosts(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    launch = started(hosts, tmp_path, *MANY_STEPS)
    launch.until_in("update")
    os.killpg(launch.script.pid, number)  # as a terminal does
    assert launch.wait() == [128 + number], launch.outputs()
    said = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert f"host-0: hybridflow: {said}" in launch.errors()
    assert launch.left() == []


@pytest.mark.release
def test_ctrl_c_before_the_run_has_begun(hosts: Hosts, tmp_path: Path) -> None:
    launch = started(hosts, tmp_path, *MANY_STEPS)
    launch.pids(2, "hybridflow agent")
    os.killpg(launch.script.pid, signal.SIGINT)
    assert launch.wait() == [130], launch.outputs()
    assert launch.left() == []


@pytest.mark.release
def test_the_run_ends_on_all_hosts_when_the_script_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    launch = started(hosts, tmp_path, *MANY_STEPS)
    launch.until_in("update")
    launch.script.kill()
    assert launch.left() == [], launch.outputs()
    assert "host-0: hybridflow: terminated" in launch.errors()


def test_a_connection_that_ends_is_told_and_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    launch = started(hosts, tmp_path, *MANY_STEPS)
    launch.until_in("update")
    [client] = [pid for pid in launch.pids(0, "ssh -F ") if "\0host-2\0cd " in _command(hosts[0], pid)]
    hosts[0].run(["kill", "-KILL", str(client)], check=True)
    assert launch.wait() == [143], launch.outputs()
    assert "ssh.sh: the connection to host-2 has ended" in launch.errors()
    assert launch.left() == []


def _command(host: Host, pid: int) -> str:
    return (host.path("/proc") / str(pid) / "cmdline").read_text()


@pytest.mark.release
def test_an_agent_that_is_killed_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    launch = started(hosts, tmp_path, *MANY_STEPS)
    launch.until_in("update")
    [agent] = launch.pids(1, "hybridflow agent")
    hosts[1].run(["kill", "-KILL", str(agent)], check=True)
    assert launch.wait() == [1], launch.outputs()
    assert "host-0: hybridflow: host-1 (10.77.0.11): its agent is gone" in launch.errors()
    assert launch.left() == []


def test_hosts_that_cannot_take_part_are_named_before_anything_starts(hosts: Hosts, tmp_path: Path) -> None:
    hosts[2].run(["mount", "-t", "tmpfs", "none", ROOT / "launch/recipes"], check=True)
    launch = started(hosts, tmp_path, lines=["host-0", "root@host-1", "host-9 # is none", "host-2"])
    assert launch.wait() == [2]
    assert launch.output(0) == ""
    assert launch.errors().splitlines() == [
        "ssh.sh: host 2 (host-9): ssh: Could not resolve hostname host-9: Temporary failure in name resolution",
        f"ssh.sh: host 3 (host-2): no recipe {ROOT}/launch/recipes/demo.yaml in {ROOT}",
    ]
    assert launch.left() == []
