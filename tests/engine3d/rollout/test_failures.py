"""Engines that die, and clients that die: one line says why, at once, and nothing is left over."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from engine3d.errors import EngineError
from engine3d.rollout import RolloutEngine, SamplingConfig
from engine3d.run_files import make_run_directory, remove_orphans
from tests.support.engine_processes import running, schedulers_of
from tests.support.engine_responses import responses_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes

SEEDED = TINY_ROLLOUT.model_copy(update={"deterministic": True})
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
SEEDS = [101, 102, 103]
SAMPLED = SamplingConfig(max_new_tokens=12)
LONG = SamplingConfig(max_new_tokens=60, ignore_eos=True)


def drawn(engine: RolloutEngine) -> list[list[int | float]]:
    """Tokens and log-probs of seeded samples, flat."""
    groups = responses_of(engine, PROMPTS, SAMPLED, samples_per_prompt=2, seeds=SEEDS)
    return [[*sample.token_ids, *sample.logprobs] for group in groups for sample in group]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def assert_nothing_left(log: Path, run_directory: Path) -> None:
    wait_until(lambda: not running(log), f"the end of all processes that write to {log}")
    wait_until(lambda: not run_directory.exists(), f"the removal of {run_directory}")
    assert not [path for path in Path("/dev/shm").iterdir() if run_directory.name in path.name]


def one_line(error: pytest.ExceptionInfo[EngineError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def start_client(model: Path, log: Path, *, warm: bool) -> tuple[BaseProcess, Connection]:
    """A process that starts an engine, sends its run directory at once, then what it generates, and waits."""

    def run(pipe: Connection) -> None:
        engine = RolloutEngine(model, SEEDED, log_path=log)
        with warm_starts() if warm else nullcontext():
            threading.Thread(target=engine.start, daemon=True).start()
            wait_until(lambda: engine._host is not None, "the host")
            assert engine._host is not None
            pipe.send(engine._host._run_directory)
            engine._host.wait_until_up(300)
        pipe.send(drawn(engine))
        signal.pause()

    ours, theirs = multiprocessing.Pipe()
    # Forked, since what a client imports takes seconds.
    client = multiprocessing.get_context("fork").Process(target=run, args=(theirs,), daemon=True)
    client.start()
    return client, ours


def test_seeded_samples_repeat_and_every_death_cleans_up(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    """Two engines: same seeds, same bits; then one's scheduler and the other's client die."""
    log = tmp_path / "rollout.log"
    with warm_starts(), RolloutEngine(tiny_model_dirs[0], SEEDED, log_path=log) as engine:
        assert engine._host is not None
        first = drawn(engine)
        assert drawn(engine) == first
        assert first[0] != first[1], "samples of one prompt have seeds of their own"
        alone = responses_of(engine, PROMPTS[1:2], SAMPLED, samples_per_prompt=2, seeds=SEEDS[1:2])
        assert [sample.token_ids for sample in alone[0]] == [row[: len(row) // 2] for row in first[2:4]]

        assert len(running(log)) >= 2
        [scheduler] = schedulers_of(engine)
        threading.Timer(0.3, os.kill, (scheduler, signal.SIGKILL)).start()
        with pytest.raises(EngineError, match="died during generation: its process was killed by SIGKILL") as death:
            while True:
                responses_of(engine, [[5]] * 60, LONG)
        assert "scheduler_0" in one_line(death)
        assert not engine.is_alive()
        with pytest.raises(EngineError, match="rollout engine is not running: its process was killed"):
            responses_of(engine, PROMPTS, SAMPLED)
        assert_nothing_left(log, engine._host._run_directory)

    client, pipe = start_client(tiny_model_dirs[0], log, warm=True)
    run_directory = pipe.recv()
    assert pipe.recv() == first
    assert len(running(log)) >= 2
    client.kill()
    client.join()
    assert_nothing_left(log, run_directory)


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
    log = tmp_path / "rollout.log"
    client, pipe = start_client(tiny_model_dirs[0], log, warm=False)
    run_directory = pipe.recv()
    time.sleep(2)
    assert running(log)
    client.kill()
    client.join()
    assert_nothing_left(log, run_directory)


def test_a_host_killed_during_start_is_seen_at_once(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    engine = RolloutEngine(tiny_model_dirs[0], TINY_ROLLOUT, log_path=tmp_path / "rollout.log")

    def kill_host() -> None:
        wait_until(lambda: engine._host is not None, "the host")
        time.sleep(1)
        assert engine._host is not None
        os.kill(engine._host.pid, signal.SIGKILL)

    threading.Thread(target=kill_host).start()
    with pytest.raises(EngineError, match="died during start: its process was killed by SIGKILL") as death:
        engine.start()
    one_line(death)
    assert engine._host is not None
    assert_nothing_left(engine._host.log_path, engine._host._run_directory)


def test_an_engine_that_is_shut_down_while_it_starts_ends_at_once(
    tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    config = TINY_ROLLOUT.model_copy(update={"shutdown_timeout_s": 3600})  # which the test would not wait for
    engine = RolloutEngine(tiny_model_dirs[0], config, log_path=tmp_path / "rollout.log")

    def shut_down() -> None:
        wait_until(lambda: engine._host is not None, "the host")
        time.sleep(1)
        engine.shutdown()

    threading.Thread(target=shut_down, daemon=True).start()
    with pytest.raises(EngineError, match="during start"):
        engine.start()
    assert engine._host is not None
    assert_nothing_left(engine._host.log_path, engine._host._run_directory)


def test_a_start_that_takes_too_long_is_ended(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    config = TINY_ROLLOUT.model_copy(update={"start_timeout_s": 1})
    engine = RolloutEngine(tiny_model_dirs[0], config, log_path=tmp_path / "rollout.log")
    with pytest.raises(EngineError, match="start was not done within 1 s; log: "):
        engine.start()
    assert engine._host is not None
    assert_nothing_left(engine._host.log_path, engine._host._run_directory)


def test_a_start_that_fails_names_its_cause(tiny_model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dirs[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    log = tmp_path / "logs" / "rollout.log"
    engine = RolloutEngine(tmp_path / "model", TINY_ROLLOUT, log_path=log)
    killed = r"died during start: its process was killed by SIG.* after: "
    with warm_starts(), pytest.raises(EngineError, match=killed) as death:
        engine.start()
    message = one_line(death)
    assert "64" in message and "96" in message and message.endswith(f"log: {log}")
    assert engine._host is not None
    assert_nothing_left(engine._host.log_path, engine._host._run_directory)
