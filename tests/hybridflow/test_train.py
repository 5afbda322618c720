"""Whole runs by the command, small and real, and what is left when one fails or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.processes

SMALL = [
    "warmup.steps=2",
    "trainer.steps=2",
    "trainer.prompts_per_step=8",
    "trainer.eval_prompts=16",
    "trainer.eval_samples=1",
    "rollout.samples_per_prompt=4",
    "data.arithmetic.train_size=64",
    "metrics.console=true",
]


def _command(directory: Path, *overrides: str) -> list[str]:
    recipe = ["launch/recipes/demo.yaml", f"run_dir={directory}", "name=small", *SMALL, *overrides]
    return [sys.executable, "-m", "hybridflow.cli", "train", *recipe]


def _mark(directory: Path) -> dict[str, str]:
    return {**os.environ, "TEST_RUN_MARK": str(directory)}


def _processes(directory: Path) -> list[psutil.Process]:
    """What carries the mark of a run or works with its files: children of Ray and SGLang may hide their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            environment, command = process.environ(), " ".join(process.cmdline())
            files = [file.path for file in process.open_files()]
            own = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        marked = environment.get("TEST_RUN_MARK") == str(directory) or str(directory) in command
        if not own and (marked or any(path.startswith(str(directory)) for path in files)):
            found.append(process)
    return found


def _wait_until_gone(directory: Path, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while left := _processes(directory):
        assert time.monotonic() < deadline, f"left over: {[(each.pid, each.cmdline()[:4]) for each in left]}"
        time.sleep(0.2)


def test_a_run_with_a_reference_and_another_layout(tmp_path: Path) -> None:
    overrides = ["train.layout.ep=1", "train.layout.tp=2", "algorithm.kl_coef=0.01", "trainer.epochs=2"]
    done = subprocess.run(
        _command(tmp_path, *overrides), capture_output=True, text=True, timeout=400, env=_mark(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("held-out accuracy: ")
    records = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["phase"] == "train"]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["mismatch/logprob_abs_diff_mean"] < 1e-5  # SGLang and Megatron agree, also after a transfer
        assert record["train/skipped_updates"] == 0 and record["train/reference_kl"] >= 0
    assert (tmp_path / "small" / "metrics.csv").is_file() and list(
        (tmp_path / "small" / "tensorboard").rglob("events*")
    )

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small" / "model", dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(tmp_path / "small" / "initial", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small" / "model")
    assert tokenizer.encode("1+2=", add_special_tokens=False) == [4, 13, 5, 16]
    assert not torch.equal(model.lm_head.weight, initial.lm_head.weight)
    _wait_until_gone(tmp_path)


def test_a_reward_that_raises_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(generated_texts):\n    raise KeyError('no such problem')\n")
    reward = f'reward.functions=[{{name: broken, path: "{tmp_path}/broken.py:score"}}]'
    done = subprocess.run(
        _command(tmp_path, reward), capture_output=True, text=True, timeout=400, env=_mark(tmp_path), check=False
    )
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert "broken" in first and "KeyError" in first and "no such problem" in first, done.stderr
    _wait_until_gone(tmp_path)


@pytest.mark.parametrize("victim", ["driver", "engine"])
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path, victim: str) -> None:
    log = tmp_path / "output.txt"
    with log.open("w") as output:
        run = subprocess.Popen(
            _command(tmp_path, "trainer.steps=500"),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_mark(tmp_path),
            start_new_session=True,
        )
    try:
        _kill_and_look(tmp_path, log, run, victim)
    finally:
        run.kill()
        run.wait()


def _kill_and_look(tmp_path: Path, log: Path, run: subprocess.Popen[bytes], victim: str) -> None:
    deadline = time.monotonic() + 240
    while "train 2/500" not in log.read_text():
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)
    if victim == "driver":
        run.kill()
        assert run.wait(timeout=10) == -signal.SIGKILL
    else:
        [scheduler] = [
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if "sglang::scheduler" in " ".join(process.info["cmdline"] or []) and _belongs_to(process, run.pid)
        ]
        scheduler.kill()
        assert run.wait(timeout=60) == 1
        errors = [line for line in log.read_text().splitlines() if line.startswith("hybridflow: ")]
        assert "rollout" in errors[0], errors
    _wait_until_gone(tmp_path)


def _belongs_to(process: psutil.Process, driver: int) -> bool:
    """Whether a process descends from the driver's Ray, which keeps the driver's session."""
    try:
        return any(parent.pid == driver for parent in process.parents())
    except psutil.Error:
        return False
