"""Whole runs by the command, small and real, and what is left when one fails or is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybridflow.rundir.status.first_failure import read_failure
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes

SMALL = [
    "warmup.steps=2",
    "trainer.steps=2",
    "trainer.prompts_per_step=8",
    "evaluation.eval.prompts=16",
    "evaluation.eval.samples=1",
    "rollout.samples_per_prompt=4",
    "data.arithmetic.train_size=64",
    "metrics.console=true",
]


def _command(directory: Path, *overrides: str) -> list[str]:
    recipe = ["launch/recipes/demo.yaml", f"run_dir={directory}", "name=small", *SMALL, *overrides]
    return [sys.executable, "-m", "hybridflow", "train", *recipe]


def _mark(directory: Path) -> dict[str, str]:
    return {**os.environ, "TEST_RUN_MARK": str(directory)}


def _records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "small" / "metrics.jsonl").read_text().splitlines()]


def _processes(directory: Path) -> list[psutil.Process]:
    """Return the processes that carry the mark of a run or work with its files: children of Ray and SGLang may hide
    their environment.
    """
    processes = []
    for process in psutil.process_iter():
        try:
            environment, command = process.environ(), " ".join(process.cmdline())
            files = [file.path for file in process.open_files()]
            ignored = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        marked = environment.get("TEST_RUN_MARK") == str(directory) or str(directory) in command
        if not ignored and (marked or any(path.startswith(str(directory)) for path in files)):
            processes.append(process)
    return processes


def _wait_until_gone(directory: Path, limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while left := _processes(directory):
        assert time.monotonic() < deadline, f"left over: {[(process.pid, process.cmdline()[:4]) for process in left]}"
        time.sleep(0.2)


def _faulty_run(directory: Path, role: str, name: str, *overrides: str) -> tuple[int, str]:
    """A run with one role replaced by one of `faulty_roles`: its exit code and the first line on stderr."""
    arguments = _command(directory, "warmup=null", *overrides)[3:]
    done = subprocess.run(
        [warm_python(), "-m", "tests.support.faulty_run", role, name, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={**_mark(directory), "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    _wait_until_gone(directory)
    return done.returncode, done.stderr.splitlines()[0]


@pytest.mark.long
def test_a_transfer_that_is_not_whole_is_found_and_not_served(tmp_path: Path) -> None:
    engines = ["placement.rollout=cpu:0-1", "rollout.engines=2", "rollout.verify_weights=true"]
    code, line = _faulty_run(tmp_path, "RolloutWorker", "Overwritten", *engines)
    assert code == 1
    where, _, what = line.partition(" does not hold what SGLang makes of the actor's export: ")
    assert where == "hybridflow: weights version 1: rollout engine 0 rank 0"
    assert re.match(r"model\.\S+ \(tensor model\.\S+\): \d+ of \d+ elements differ, and \d+ more$", what), what
    assert not _records(tmp_path)
    assert "Prefill batch" not in (tmp_path / "small" / "logs" / "sglang-0.log").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("DiesSending", "actor rank 1, send_weights: the process died", marks=pytest.mark.release),
        pytest.param("DoesNotStart", "actor rank 1, start: no room for the optimizer", marks=pytest.mark.long),
    ],
)
def test_a_fault_on_the_way_of_weights_ends_the_run(tmp_path: Path, name: str, message: str) -> None:
    separate = ["placement.rollout=cpu:2-3", "rollout.engine.tp=2", "rollout.weights.transport=collective"]
    # An actor that does not start must be seen although the engine waits for it, to share its memory.
    placement = [] if name == "DoesNotStart" else separate
    code, line = _faulty_run(tmp_path, "PolicyWorker", name, *placement)
    assert code == 1
    assert line.startswith(f"hybridflow: {message}")
    fault = float((tmp_path / "small" / "fault").read_text())
    assert time.time() - fault < 240


REWARD = """
import os, pathlib, signal

def kill_driver(generated_texts):
    pid = os.getpid()
    while "train" not in pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\\0"):
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)

def exit_itself(generated_texts):
    os._exit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["kill_driver", pytest.param("exit_itself", marks=pytest.mark.release)])
def test_a_reward_that_ends_processes_is_told_from_a_failure_of_ray(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    reward = f"reward.functions=[{{name: own, path: '{tmp_path}/own.py:{name}'}}]"
    words = _command(tmp_path, "warmup=null", reward)  # not forked: the reward knows the driver by its command line
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, env=_mark(tmp_path), check=False)
    _wait_until_gone(tmp_path)
    cause, *_ = done.stderr.splitlines()
    if name == "kill_driver":
        assert done.returncode == -9, done.stderr
        assert re.fullmatch(r"hybridflow: the driver \(process \d+\) was killed, or ended without a word", cause)
    else:
        assert done.returncode == 1, done.stderr
        assert cause == (  # of the evaluation before the first step
            f"hybridflow: reward rank 0, score_set: reward 'own' ({tmp_path}/own.py:{name}) ended with exit code 3 "
            "instead of returning"
        )
    failure = read_failure(tmp_path / "small")
    assert failure is not None and failure.cause == cause.removeprefix("hybridflow: ")
