"""Limits of a reward function's process, and checks of its answers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import RewardResult

pytestmark = pytest.mark.processes


def function(tmp_path: Path, source: str, **settings: object) -> RewardFunctionConfig:
    path = tmp_path / "mine.py"
    path.write_text(source)
    return RewardFunctionConfig.model_validate({"name": "mine", "path": f"{path}:reward", **settings})


def evaluated(config: RewardFunctionConfig, size: int = 1) -> RewardResult:
    with RewardFunctions(RewardConfig(functions=(config,))) as rewards:
        return rewards.evaluate(["a"] * size, [""] * size, [""] * size)


def failure_of(config: RewardFunctionConfig, size: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        evaluated(config, size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_sees_of_the_environment_what_every_program_needs_and_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "JUDGE_KEY", "PYTHONPATH", "LD_PRELOAD_OF_MINE"):
        monkeypatch.setenv(name, "secret")
    seen = tmp_path / "seen"
    source = f"import os\ndef reward(texts):\n open({str(seen)!r}, 'w').write(' '.join(os.environ))\n return [1]\n"
    evaluated(function(tmp_path, source, environment=["JUDGE_KEY"]))
    names = set(seen.read_text().split())
    assert {"PATH", "HOME", "JUDGE_KEY"} <= names
    assert not names & {"RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "PYTHONPATH", "LD_PRELOAD_OF_MINE"}


DAEMON = """
import os, time
def daemon(marker):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 100)
            with open(marker, "a") as file: file.write(f"{os.getpid()} ")
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.wait()
    while not (os.path.exists(marker) and os.path.getsize(marker)): time.sleep(0.01)
def reward(texts):
    daemon(MARKER)
    END
    return [1.0] * len(texts)
"""


@pytest.mark.parametrize("end", ["pass", "os._exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_daemons_without_environment_or_parent_end_with_it(tmp_path: Path, end: str) -> None:
    marker = tmp_path / "marker"
    source = DAEMON.replace("MARKER", repr(str(marker))).replace("END", end)
    config = function(tmp_path, source, timeout_s=1.0 if "sleep" in end else 30.0)
    if end == "pass":
        evaluated(config)
    else:
        failure_of(config)
    pids = [int(pid) for pid in marker.read_text().split()]
    assert pids
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "a daemon lives on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "limits", "message"),
    [
        ("bytearray(300 << 20)", {"memory_gb": 0.2}, "; limits.memory_gb is 0.2"),
        ("with open(PATH, 'wb') as file: file.write(bytes(20000))", {"file_gb": 1e-6}, "File too large"),
        ("[open(PATH, 'a') for _ in range(100)]", {"open_files": 64}, "Too many open files"),
        (
            "[subprocess.Popen(['sleep', '86399.5'], start_new_session=True) for _ in range(20)]; time.sleep(60)",
            {"processes": 10},
            "processes where limits.processes is 10 and was killed instead of returning",
        ),
    ],
)
def test_what_it_takes_is_limited(tmp_path: Path, body: str, limits: dict[str, float], message: str) -> None:
    source = f"import subprocess, time\nPATH = {str(tmp_path / 'file')!r}\ndef reward(texts):\n    {body}\n"
    failure = failure_of(function(tmp_path, source, limits=limits))
    assert failure.startswith("reward 'mine' ") and message in failure
    left = [
        process.info["pid"]
        for process in psutil.process_iter(["cmdline", "pid"])
        if "86399.5" in (process.info["cmdline"] or ())
    ]
    assert not left


def test_what_it_prints_is_kept_up_to_a_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "import os\ndef reward(texts):\n    for _ in range(300): os.write(1, b'x' * 10000)\n    return [1]\n"
    result = evaluated(function(tmp_path, source, limits={"output_mb": 0.05}))
    assert result.total.tolist() == [1.0]
    printed = capfd.readouterr().err
    assert printed == "x" * 50_000 + "\n[reward 'mine' has printed more, which is dropped]\n"


def test_one_that_closes_its_output_leaves_its_supervisor_idle(tmp_path: Path) -> None:
    output = tmp_path / "told"
    source = (
        "import os\ndef reward(texts):\n os.close(1)\n os.close(2)\n"
        f" open({str(output)!r}, 'w').write(str(os.getppid()))\n return [1]\n"
    )
    with RewardFunctions(RewardConfig(functions=(function(tmp_path, source),))) as rewards:
        assert rewards.evaluate(["a"], [""], [""]).total.tolist() == [1.0]
        supervisor = psutil.Process(int(output.read_text()))
        before = supervisor.cpu_times()
        time.sleep(1.0)
        after = supervisor.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2


FORGES = """
import json, os, socket, stat, struct
def say(body):
    for fd in range(3, 4096):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                socket.socket(fileno=os.dup(fd)).sendall(body)
        except OSError: pass
def message(facts): return struct.pack("!I", len(facts)) + facts
def reward(texts):
    say(FORGED)
    import time; time.sleep(60)
"""


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ('message(b\'{"call": 1, "values": [NaN]}\')', "answered nan for sample 0, expected a finite number"),
        ('message(b\'{"call": 1, "values": [1e39]}\')', "answered 1e+39 for sample 0, expected a finite number"),
        ('message(b\'{"call": 1, "values": [true]}\')', "answered True for sample 0, expected a finite number"),
        ('message(b\'{"call": 1, "values": [[1]]}\')', "answered [1] for sample 0, expected a finite number"),
        ('message(b\'{"call": 1, "values": [1, 1]}\')', "gave no answer with 1 values"),
        ("message(b'{\"call\": 1}')", "gave no answer with 1 values"),
        ('message(b\'{"call": 7, "values": [1]}\')', "gave an answer to a call that was not made"),
        ("message(b'[1]')", "answered with a message that is a list"),
        ("message(b'[' * 60000)", "answered with a message that is nested too deeply"),
        ("message(b'{')", "answered with Expecting property name"),
        ("struct.pack('!I', 2**32 - 1)", "answered with a message of 4294967295 bytes, expected at most"),
        ("message(json.dumps({'call': 1, 'error': 'a\\n\\x1b[31m' + 'b' * 5000}).encode())", "a ?[31mbbbb"),
    ],
)
def test_answers_are_checked_where_they_arrive(tmp_path: Path, forged: str, reason: str) -> None:
    failure = failure_of(function(tmp_path, FORGES.replace("FORGED", forged), timeout_s=20.0))
    assert failure.startswith("reward 'mine' ") and reason in failure
    assert len(failure) < 1300


def test_a_weight_that_makes_a_value_infinite_is_named(tmp_path: Path) -> None:
    config = function(tmp_path, "def reward(texts): return [0, 1e30]", weight=1e30)
    assert "its weight 1e+30 times its value of sample 1 is not finite in float32" in failure_of(config, size=2)


def test_a_sum_that_is_not_finite_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def reward(texts): return [2e38]")
    mine = function(tmp_path, "def reward(texts): return [2e38]")
    other = RewardFunctionConfig(name="other", path=f"{tmp_path}/other.py:reward")
    with RewardFunctions(RewardConfig(functions=(mine, other))) as rewards, pytest.raises(UserError) as caught:
        rewards.evaluate(["a"], [""], [""])
    assert str(caught.value) == "rewards: their sum 1 x 'mine' + 1 x 'other' of sample 0 is not finite in float32"


def test_the_working_directory_gives_the_named_module_and_shadows_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for planted in ("json.py", "inspect.py", "xxhash.py"):
        (tmp_path / planted).write_text("raise SystemExit('planted')")
    (tmp_path / "near.py").write_text("VALUE = 7")
    # A module of this name is the standard library's too.
    (tmp_path / "colorsys.py").write_text("import xxhash, json, near\ndef reward(texts): return [near.VALUE]\n")
    config = RewardFunctionConfig(name="mine", path="colorsys:reward")
    assert evaluated(config).total.tolist() == [7.0]
    assert os.getcwd() == str(tmp_path)  # noqa: PTH109


LOADED = "def reward(texts): return [1.0] * len(texts)\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import os\nos.closerange(3, 4096)",
            "closed a file descriptor that it had not opened, the one for its answers",
        ),
        (
            "import os\nos.closerange(0, 4096)",
            "closed a file descriptor that it had not opened, the one for its answers",
        ),
        ("import sys\nsys.exit('no licence')", "cannot be imported: SystemExit at {file}:2: no licence"),
        ("import os\nos._exit(3)", "ended with exit code 3 instead of returning from its import"),
        ("import os\nos.execv('/bin/true', ['true'])", "ended with exit code 0 instead of returning from its import"),
        ("import os\nos.kill(os.getpid(), 11)", "was killed by SIGSEGV instead of returning from its import"),
        ("input('a number? ')", "cannot be imported: EOFError at {file}:1"),
        ("raise ValueError('a\\n\\x1b[31mb')", "cannot be imported: ValueError at {file}:1: a ?[31mb"),
        ("class Odd(BaseException):\n def __str__(self): 1 / 0\nraise Odd", "cannot be imported: Odd at {file}:3"),
    ],
)
def test_what_its_import_does_is_one_line(
    tmp_path: Path, source: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = function(tmp_path, f"{source}\n{LOADED}")
    assert reason.format(file=tmp_path / "mine.py") in failure_of(config)
    assert capfd.readouterr().err in ("", "a number? \n")


@pytest.mark.parametrize(
    "source", ["import os\nos.fork()", "import os\nif os.fork() == 0:\n os.setsid()", "import os\nos.chdir('/')"]
)
def test_an_import_that_forks_or_changes_directory_is_harmless(
    tmp_path: Path, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(function(tmp_path, f"{source}\n{LOADED}"), 3).total.tolist() == [1.0] * 3
    assert capfd.readouterr().err == ""


def test_one_that_closes_descriptors_in_a_call_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "import os\ndef reward(texts):\n os.closerange(0, 4096)\n return [1.0]"
    assert "closed a file descriptor that it had not opened" in failure_of(function(tmp_path, source))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (
            "for n in range(300_000): print(n)",
            [*map(str, range(10)), "[reward 'mine' has printed more, which is dropped]"],
        ),
        ("print('x' * 3_000_000)", ["x" * 10_000, "[reward 'mine' has printed more, which is dropped]"]),
        ("print('\\n' * 100)", [*[""] * 10, "[reward 'mine' has printed more, which is dropped]"]),
        ("import os\nos.write(2, bytes(range(32)) + b'\\x7fa\\x1b[2J')", ["?" * 9 + "\t", "??", "?" * 18 + "?a?[2J"]),
        ("print('a', end='', flush=True)", ["a"]),
    ],
)
def test_what_its_import_prints_is_bounded_and_harmless(
    tmp_path: Path, source: str, lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    config = function(tmp_path, f"{source}\n{LOADED}")
    with RewardFunctions(RewardConfig(functions=(config,)), output_lines=10) as rewards:
        rewards.load()
        rewards.evaluate(["a"], [""], [""])
    printed = capfd.readouterr().err
    assert printed.splitlines() == lines and printed.endswith("\n")
