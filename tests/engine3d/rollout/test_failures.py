"""Engines that die, and clients that die: one line says why, at once, and nothing is left over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine3d.errors import EngineError
from engine3d.rollout import RolloutEngine, SamplingConfig
from engine3d.run_files import make_run_directory, remove_orphans
from tests.support.engine_responses import responses_of
from tests.support.tiny_rollout import TINY_ROLLOUT

pytestmark = pytest.mark.processes

SEEDED = TINY_ROLLOUT.model_copy(update={"deterministic": True})
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
SEEDS = [101, 102, 103]
SAMPLED = SamplingConfig(max_new_tokens=12)
LONG = SamplingConfig(max_new_tokens=60, ignore_eos=True)

# Starts an engine, says its process group and temporary directory at once, then what it generates, and waits.
CLIENT = """
import json, sys, threading, time
from engine3d.rollout import RolloutEngine
from engine3d.run_files import make_run_directory, remove_orphans
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.engine3d.rollout import test_failures as failures

engine = RolloutEngine(sys.argv[1], failures.SEEDED, log_path=sys.argv[2])
threading.Thread(target=engine.start, daemon=True).start()
while engine._host is None:
    time.sleep(0.01)
print(json.dumps([engine._host.pid, str(engine._host._run_directory)]), flush=True)
engine._host.wait_until_up(300)
print(json.dumps(failures.drawn(engine)), flush=True)
time.sleep(300)
"""


def drawn(engine: RolloutEngine) -> list[list[int | float]]:
    """Tokens and log-probs of seeded samples, flat."""
    groups = responses_of(engine, PROMPTS, SAMPLED, samples_per_prompt=2, seeds=SEEDS)
    return [[*sample.token_ids, *sample.logprobs] for group in groups for sample in group]


def running(group: int) -> list[int]:
    """Processes of a process group that run: a zombie waits only for its parent to look."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            processes.append(int(stat.parent.name))
    return processes


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def assert_nothing_left(group: int, run_directory: Path) -> None:
    wait_until(lambda: not running(group), f"the end of process group {group}")
    wait_until(lambda: not run_directory.exists(), f"the removal of {run_directory}")
    assert not [path for path in Path("/dev/shm").iterdir() if run_directory.name in path.name]


def one_line(error: pytest.ExceptionInfo[EngineError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def scheduler_of(group: int) -> int:
    for process in running(group):
        if b"sglang::scheduler" in Path(f"/proc/{process}/cmdline").read_bytes():
            return process
    raise AssertionError(f"no scheduler in process group {group}")


def test_seeded_samples_repeat_and_every_death_cleans_up(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    """Two engines, since starting one is slow: same seeds, same bits; then one's scheduler and one's client die."""
    with RolloutEngine(tiny_model_dirs[0], SEEDED, log_path=tmp_path / "rollout.log") as engine:
        assert engine._host is not None
        group, run_directory = engine._host.pid, engine._host._run_directory
        first = drawn(engine)
        assert drawn(engine) == first
        assert first[0] != first[1], "samples of one prompt have seeds of their own"
        alone = responses_of(engine, PROMPTS[1:2], SAMPLED, samples_per_prompt=2, seeds=SEEDS[1:2])
        assert [sample.token_ids for sample in alone[0]] == [row[: len(row) // 2] for row in first[2:4]]

        killer = threading.Timer(0.3, os.kill, (scheduler_of(group), signal.SIGKILL))
        killer.start()
        before = time.monotonic()
        with pytest.raises(EngineError, match="died during generation: its process was killed by SIGKILL") as death:
            while True:
                responses_of(engine, [[5]] * 60, LONG)
        assert time.monotonic() - before < 20
        assert "scheduler_0" in one_line(death)
        assert not engine.is_alive()
        with pytest.raises(EngineError, match="rollout engine is not running: its process was killed"):
            responses_of(engine, PROMPTS, SAMPLED)
        assert_nothing_left(group, Path(run_directory))

    client = start_client(tiny_model_dirs[0], tmp_path / "rollout.log")
    assert client.stdout is not None
    group, run_directory = json.loads(client.stdout.readline())
    assert json.loads(client.stdout.readline()) == first
    assert len(running(group)) >= 2
    client.kill()
    client.wait()
    assert_nothing_left(group, Path(run_directory))


def start_client(model: Path, log_path: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(model), str(log_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_directories_of_runs_that_ended_while_they_were_made_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, young = (tmp_path / f"new-engine3d-rollout-{name}" for name in ("aged_run", "new__run"))
    for directory in (old, young):
        directory.mkdir()
        (directory / "owner").touch()
    os.utime(old, (time.time() - 100,) * 2)
    directory, lock = make_run_directory()
    assert sorted(tmp_path.iterdir()) == sorted((directory, young))
    lock.close()  # as where its owner is killed
    remove_orphans()
    assert list(tmp_path.iterdir()) == [young]


def test_a_client_killed_during_start_leaves_nothing(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    client = start_client(tiny_model_dirs[0], tmp_path / "rollout.log")
    assert client.stdout is not None
    group, run_directory = json.loads(client.stdout.readline())
    time.sleep(2)
    assert running(group)
    client.kill()
    client.wait()
    assert_nothing_left(group, Path(run_directory))


def test_a_host_killed_during_start_is_seen_at_once(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    engine = RolloutEngine(tiny_model_dirs[0], TINY_ROLLOUT, log_path=tmp_path / "rollout.log")

    def kill_host() -> None:
        wait_until(lambda: engine._host is not None, "the host")
        time.sleep(1)
        assert engine._host is not None
        os.kill(engine._host.pid, signal.SIGKILL)

    threading.Thread(target=kill_host).start()
    before = time.monotonic()
    with pytest.raises(EngineError, match="died during start: its process was killed by SIGKILL") as death:
        engine.start()
    assert time.monotonic() - before < 15
    one_line(death)
    assert engine._host is not None
    assert_nothing_left(engine._host.pid, engine._host._run_directory)


def test_a_start_that_takes_too_long_is_ended(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    config = TINY_ROLLOUT.model_copy(update={"start_timeout_s": 1})
    engine = RolloutEngine(tiny_model_dirs[0], config, log_path=tmp_path / "rollout.log")
    with pytest.raises(EngineError, match="start was not done within 1 s; log: "):
        engine.start()
    assert engine._host is not None
    assert_nothing_left(engine._host.pid, engine._host._run_directory)


def test_a_start_that_fails_names_its_cause(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dirs[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    log = tmp_path / "logs" / "rollout.log"
    engine = RolloutEngine(tmp_path / "model", TINY_ROLLOUT, log_path=log)
    with pytest.raises(EngineError, match=r"died during start: its process was killed by SIG.* after: ") as death:
        engine.start()
    message = one_line(death)
    assert "64" in message and "96" in message and message.endswith(f"log: {log}")
    assert engine._host is not None
    assert_nothing_left(engine._host.pid, engine._host._run_directory)
