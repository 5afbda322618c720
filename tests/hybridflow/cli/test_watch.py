"""`hybridflow status` and `hybridflow logs`, on the files of a run."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.cli.main import main
from hybridflow.rundir.run_record import record_end, record_start
from hybridflow.rundir.status import lock
from hybridflow.rundir.status.first_failure import describe, keep_earlier, write_failure
from hybridflow.rundir.status.heartbeat import Heartbeat, HeartbeatFile
from hybridflow.rundir.status.hosts_file import RunHost, write_hosts
from hybridflow.rundir.status.lock import LOCK, hold
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.rundir.status.watching import goes_on, last_lines
from tests.support.runs import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "recipe.yaml").write_text("name: small\ntrainer:\n  steps: 40\n")
    for name in ("actor-0", "actor-10", "actor-2", "sglang-0", "rollout-0"):
        (tmp_path / "logs" / f"{name}.log").write_text("".join(f"line {n} of {name}\n" for n in range(30)))
    (tmp_path / "logs" / "notes.txt").write_text("no rank's\n")
    records = [
        {"phase": "train", "step": 11, "reward/mean": 0.25, "train/step_time_ms": 1500.0},
        {"phase": "eval", "step": 11, "eval/accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"phase": "tra')
    phases = PhaseFile(tmp_path / "phase.json")
    phases.step = 12
    phases.enter("rollout")
    return tmp_path


def test_status_of_a_run_that_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(run, "run_dir/name"):
        assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{run}: running; step 12 of 40, rollout for \d s", lines[0])
    assert lines[1:3] == ["train 11/40  reward 0.250  step 1.50 s", "no whole checkpoint"]
    assert re.fullmatch(r"actor-0    \d s ago: line 29 of actor-0", lines[3])
    assert [line.split()[0] for line in lines[3:]] == ["actor-0", "actor-2", "actor-10", "rollout-0", "sglang-0"]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"phase": "sft", "step": 30, "sft/loss": 1.5}, "warm-up 30/50  loss 1.5000"),
        ({"phase": "eval", "step": 0, "eval/accuracy": 0.5}, "eval 0  accuracy 0.500"),
        ({"phase": "train", "step": 3, "reward/mean": 0.5, "train/loss": "nan"}, "train 3/40  reward 0.500  loss +nan"),
    ],
)
def test_status_counts_the_steps_of_the_phase(
    run: Path, capsys: pytest.CaptureFixture[str], record: dict[str, object], line: str
) -> None:
    (run / "recipe.yaml").write_text("name: small\ntrainer:\n  steps: 40\nwarmup:\n  steps: 50\n")
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["status", str(run)]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_status_of_a_run_that_does_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    assert f"{run}: not running; it ended in step 12 of 40, rollout (entered 2" in capsys.readouterr().out


def test_status_of_a_finished_run_shows_its_result(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_start(run, None, {"torch": "2.11.0"}, None, 100, 60)
    record_start(run, 20, {"torch": "2.11.0"}, None, 100, 60)
    record_end(run, ["held-out accuracy: 0.396 -> 0.472 (+7.5 points), 256 prompts, step 0 -> step 40"])
    (run / "model").mkdir()
    PhaseFile(run / "phase.json").enter("end")
    assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{run}: finished, 2[-\d]+ [:\d]+", lines[0])
    assert lines[1:] == [
        "0 s after its start, resumed 1 time",
        "held-out accuracy: 0.396 -> 0.472 (+7.5 points), 256 prompts, step 0 -> step 40",
        "train 11/40  reward 0.250  step 1.50 s",
        "no whole checkpoint",
        f"model {run / 'model'}",
        f"hybridflow report {run} draws its metrics, hybridflow logs shows its logs",
    ]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ("step 3\n/a/b.py:12: UserWarning: slow\n  return func(*args)\n", "step 3"),
        ("step 3\n[rank0]:/a/b.py:12: FutureWarning: slow\n", "step 3"),
        ("/a/b.py:12: UserWarning: slow\n  return func(*args)\n", "/a/b.py:12: UserWarning: slow"),
        ("ValueError: x\n  at the end\n", "  at the end"),
    ],
)
def test_status_shows_no_warning_of_python_where_a_log_says_more(
    run: Path, capsys: pytest.CaptureFixture[str], log: str, shown: str
) -> None:
    (run / "logs" / "actor-0.log").write_text(log)
    assert main(["status", str(run)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("actor-0 "))
    assert line.partition("ago: ")[2] == shown


def test_who_watches_does_not_keep_a_run_from_starting(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(run, "run_dir/name").close()
    watching = (run / LOCK).open()
    fcntl.flock(watching, fcntl.LOCK_SH)  # for the moment in which it looks
    monkeypatch.setattr(lock.time, "sleep", lambda _: watching.close())
    with hold(run, "run_dir/name"):
        assert watching.closed and goes_on(run)
        with pytest.raises(UserError, match="is going on"):
            hold(run, "run_dir/name")
    assert not goes_on(run)


def test_logs_are_chosen_by_role_and_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run), "--role", "actor", "--rank", "2", "--lines", "2"]) == 0
    assert capsys.readouterr().out == "actor-2: line 28 of actor-2\nactor-2: line 29 of actor-2\n"
    assert main(["logs", str(run), "--role", "rollout", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "rollout-0: line 29 of rollout-0\nsglang-0: line 29 of sglang-0\n"
    assert main(["logs", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5 * 20


def beat(run: Path, role: str, rank: int, host: str, method: str) -> None:
    now = time.time()
    said = Heartbeat(role, rank, host, 1, method, True, now - 70, 3, now - 70, None, True, now - (30 if rank else 0))
    HeartbeatFile(run / "logs" / f"{role}-{rank}.heartbeat").write(said)


def test_status_says_what_ranks_are_at_and_which_are_silent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beat(run, "actor", 2, "host-1", "update")
    beat(run, "rollout", 0, "host-2", "")
    with hold(run, "run_dir/name"):
        assert main(["status", str(run)]) == 0
    output = capsys.readouterr().out
    assert "\nactor-2    on host-1: update for 1.2 min, 3 parts done, no heartbeat for 30 s; " in output
    assert "\nrollout-0  on host-2: idle for 1.2 min; 0 s ago: " in output
    assert "\nsglang-0   on host-2: 0 s ago: line 29 of sglang-0\n" in output
    assert "\nhosts " not in output  # no launcher has started it
    assert main(["status", str(run)]) == 0
    assert "idle" not in capsys.readouterr().out  # of a run that has ended


def test_status_names_the_hosts_of_a_launch_and_those_that_are_silent(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hosts(run, [RunHost(f"host-{index}", f"10.0.0.1{index}", "eth0", None, 0, 4) for index in range(3)])
    beat(run, "actor", 2, "host-1", "update")
    beat(run, "rollout", 0, "host-2", "")
    with hold(run, "run_dir/name"):
        assert main(["status", str(run)]) == 0
    assert "\nhosts host-0, host-1, host-2; no heartbeat of host-1 for 30 s\n" in capsys.readouterr().out
    assert main(["status", str(run)]) == 0
    assert "\nhosts " not in capsys.readouterr().out


def test_logs_of_a_host_have_those_of_its_engines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beat(run, "actor", 2, "host-1", "update")
    beat(run, "rollout", 0, "host-2", "")
    assert main(["logs", str(run), "--host", "host-2", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "rollout-0: line 29 of rollout-0\nsglang-0: line 29 of sglang-0\n"
    assert main(["logs", str(run), "--host", "host-3"]) == 2
    assert re.search(
        r"no log of --host host-3 in .*; there are: actor-0, .*, on host-1, host-2$", capsys.readouterr().err
    )


def test_the_first_failure_is_shown_with_its_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run), "--first-failure"]) == 2
    assert f"no failure.json in {run}: the run has not failed" in capsys.readouterr().err
    write_failure(run, describe(run, "actor rank 2, update: ValueError: x", "step 3, update", role="actor", rank=2))
    assert main(["logs", str(run), "--first-failure", "--lines", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "  cause      actor rank 2, update: ValueError: x"
    assert shown[-1] == "actor-2: line 29 of actor-2"
    assert main(["status", str(run)]) == 0
    assert "  cause      actor rank 2, update: ValueError: x" in capsys.readouterr().out.splitlines()[1]
    assert main(["logs", str(run), "--first-failure", "--rank", "1"]) == 2
    assert "--first-failure with --rank: it chooses the log itself" in capsys.readouterr().err


def test_what_earlier_starts_failed_of_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_earlier(run, [describe(run, "host-1 (10.0.0.11): no sign of life", "step 3, update")])
    assert main(["status", str(run)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert re.fullmatch(r"start 1 failed in step 3, update, [-\d]+ [:\d]+: host-1 \(10.0.0.11\): no sign of life", line)


def test_what_a_terminal_would_obey_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "logs" / "actor-0.log").write_bytes(b" 10%\r 50%\r100%\r\n\x1b[2Jgone \xff\n")
    assert main(["logs", str(run), "--role", "actor", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "actor-0: 100%\nactor-0: \\x1b[2Jgone \N{REPLACEMENT CHARACTER}\n"


@pytest.mark.processes
def test_logs_are_followed_until_the_run_has_ended(run: Path) -> None:
    log, late = run / "logs" / "actor-0.log", run / "logs" / "critic-0.log"
    with hold(run, "run_dir/name"):
        command = [sys.executable, "-m", "hybridflow", "logs", str(run), "--follow", "--lines", "1", "--rank", "0"]
        following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert following.stdout is not None
        first = sorted(following.stdout.readline() for _ in range(3))
        assert first == [f"{name}: line 29 of {name}\n" for name in ("actor-0", "rollout-0", "sglang-0")]
        late.write_text("the first\nand ")
        with log.open("a") as file:
            file.write("half")
            file.flush()
            time.sleep(1.2)  # longer than between two looks
            file.write(" a line\nno end")
        assert following.stdout.readline() == "critic-0: the first\n"
        assert following.stdout.readline() == "actor-0: half a line\n"
    rest, _ = following.communicate(timeout=30)
    assert rest == "actor-0: no end\ncritic-0: and \n"
    assert following.returncode == 0


@pytest.mark.processes
def test_logs_are_followed_until_their_reader_is_gone(run: Path) -> None:
    with hold(run, "run_dir/name"):
        command = [sys.executable, "-m", "hybridflow", "logs", str(run), "--follow", "--lines", "1", "--role", "critic"]
        following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert following.stdout is not None and following.stderr is not None
        log = run / "logs" / "critic-0.log"
        log.write_text("the first\n")
        assert following.stdout.readline() == "critic-0: the first\n"
        following.stdout.close()
        with log.open("a") as file:
            file.write("the second\n")
        assert following.wait(timeout=60) == 128 + signal.SIGPIPE
    with following.stderr:
        assert following.stderr.read() == ""


@pytest.mark.processes
def test_a_rank_of_a_host_that_comes_later_is_followed_too(run: Path) -> None:
    with hold(run, "run_dir/name"):
        command = [sys.executable, "-m", "hybridflow", "logs", str(run), "--follow", "--lines", "1", "--host", "host-1"]
        following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        time.sleep(0.5)
        beat(run, "actor", 2, "host-1", "update")
        assert following.stdout is not None and following.stdout.readline() == "actor-2: line 29 of actor-2\n"
    rest, _ = following.communicate(timeout=30)
    assert (rest, following.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status", "{run}/none"], "hybridflow: no such directory: {run}/none; expected that of a run"),
        (["status", "{run}/logs"], "hybridflow: no recipe.yaml in {run}/logs; expected the directory of a run"),
        (["logs", "{run}", "--role", "critic"], "no log of --role critic in {run}; there are: actor-0, actor-2, actor"),
        (["logs", "{run}", "--lines", "-1"], "hybridflow: --lines -1: expected at least 0"),
    ],
)
def test_what_is_wrong_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert main([word.format(run=run) for word in words]) == 2
    error = capsys.readouterr().err
    assert expected.format(run=run) in error and error.count("\n") == 1


def test_a_damaged_phase_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "phase.json").write_text('{"step": 1}\n')
    assert main(["status", str(run)]) == 2
    assert f"{run}/phase.json: " in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200_000])
def test_last_lines_of_a_file_of_any_size(tmp_path: Path, size: int) -> None:
    path, text = tmp_path / "log", (b"x" * 700 + b"\n") * (size // 701) + b"y" * (size % 701)
    path.write_bytes(text)
    for count in (0, 1, 3, 1000):
        assert last_lines(path, count) == (text.splitlines()[-count:] if count else [])
