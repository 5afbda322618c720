"""Refusals of `launch/ssh.sh` before it reaches any host, and the commands that it would start."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SSH = ROOT / "launch/ssh.sh"


def ssh(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    # Were it to go on, it would reach nobody.
    given = kept | {"HYBRIDFLOW_SSH": "false"} | environment
    return subprocess.run(
        [SSH, *words], env=given, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def refused(*words: str | Path, **environment: str) -> str:
    done = ssh(*words, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    return line.removeprefix("ssh.sh: ")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a\nb\n# c\n\na", 5, "a is there already, in line 1"),
        ("a\nuser@a", 2, "a is there already, in line 1"),
        ("a roll=train", 1, "roll=train: expected role=..., interface=..., cpu_slots=... or spare"),
        ("a role=critic", 1, "role=critic: expected role=train, role=rollout or role=reward"),
        ("a cpu_slots=0", 1, "cpu_slots=0: expected cpu_slots=N"),
        ("a interface=", 1, "interface=: expected interface=NAME"),
        ("a b", 1, "b: expected role=..., interface=..., cpu_slots=... or spare"),
        ("a\n-oProxyCommand=x", 2, "-oProxyCommand=x: expected a host such as node-1 or user@node-1"),
        ("$(x)", 1, "$(x): expected a host such as node-1 or user@node-1"),
    ],
)
def test_a_wrong_line_of_the_host_file_is_named(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert refused(path, "recipe.yaml") == f"host file {path}:{line}: {said}"


def test_a_host_file_without_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    assert refused(path, "recipe.yaml") == f"host file {path}: no such file"
    path.write_text("# none\n\n")
    assert refused(path, "recipe.yaml") == f"host file {path}: it names no host"
    path.write_text("a spare\n")
    assert refused(path, "recipe.yaml") == f"host file {path}: it names no host that is not spare"


def test_spare_hosts_come_last_and_need_restarts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("s spare role=rollout\na\nb\n")
    done = ssh("--dry-run", "--python", "/p", "--dir", "/d", "--max-restarts", "2", path, "r.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    hosts = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [words[-2] for words in hosts] == ["a", "b", "s"]
    of_spare = "--host 2 --hosts 3 --head a:29400 --max-restarts 2 --spares 1 --role rollout train r.yaml"
    assert hosts[2][-1].endswith(f"--stdin {of_spare}")
    said = "1 spare hosts without --max-restarts would never be used"
    assert refused(path, "recipe.yaml") == f"host file {path}: {said}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected HOSTFILE RECIPE [key=value ...] (see --help)"),
        (["hosts"], "expected HOSTFILE RECIPE [key=value ...] (see --help)"),
        (["--other", "hosts", "r"], "--other: no such option (see --help)"),
        (["--port"], "--port needs a value (see --help)"),
        (["--port", "70000", "hosts", "r"], "port 70000: expected a number from 1 to 65535"),
        (["--dir", "here", "hosts", "r"], "directory here: expected an absolute path, the same on every host"),
        (["--env", "1=2", "hosts", "r"], "--env 1=2: expected NAME or NAME=VALUE"),
        (["--env", "NOT_SET", "hosts", "r"], "--env NOT_SET: it is not set here; expected NAME=VALUE"),
        (["--env", "HYBRIDFLOW_TOKEN=1", "h", "r"], "--env HYBRIDFLOW_TOKEN: every run gets a new token by itself"),
        (["hosts", "r", "seed"], "seed: expected a setting such as seed=1 behind the recipe"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    assert refused(*words) == said


def test_no_such_ssh() -> None:
    assert refused("hosts", "r", HYBRIDFLOW_SSH="no-ssh -v") == "no-ssh: no such program (Debian: openssh-client)"


def test_hosts_that_are_not_reached_are_named_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\n".join(f"host-{index}" for index in range(11)))
    done = ssh(path, "recipe.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    lines = [f"ssh.sh: host {index} (host-{index}): it says nothing" for index in range(8)]
    assert done.stderr.splitlines() == [*lines, "ssh.sh: and 3 more of 11 hosts"]


def test_a_dry_run_prints_a_command_a_host(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("me@a:1 role=train interface=eth0 cpu_slots=4 # first\n\nb")
    options = ["--dry-run", "--dir", "/a b", "--python", "/p", "--port", "1", "--env", "NAME=it's"]
    done = ssh(*options, path, "r.yaml", "a={b: 'c'}", HYBRIDFLOW_SSH="ssh -p 2222")
    assert (done.returncode, done.stderr) == (0, "")
    hosts = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [words[:3] + words[-2:-1] for words in hosts] == [["ssh", "-p", "2222", host] for host in ("me@a:1", "b")]
    agent = ["/p", "-m", "hybridflow", "agent", "--stdin"]
    for index, options in enumerate((["--role", "train", "--interface", "eth0", "--cpu-slots", "4"], [])):
        of_host = ["--host", str(index), "--hosts", "2", "--head", "[a:1]:1", *options]
        assert shlex.split(hosts[index][-1]) == [
            *["cd", "/a b", "&&", "exec", "env", "NAME=it's", *agent, *of_host, "train", "r.yaml", "a={b: 'c'}"]
        ]
