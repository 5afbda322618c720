"""A run whose reward function asks a judge that the run serves itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.judge_model import make_judge
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROOT = Path(__file__).parents[2]
_LIMIT_S = 550.0


def test_the_example_runs_and_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    judge = make_judge(tmp_path / "model")
    run = tmp_path / "runs/own_judge"
    words = [
        *("-m", "hybridflow", "train", str(ROOT / "examples/own_judge.yaml"), f"run_dir={tmp_path / 'runs'}"),
        *(f"judge.path={judge}", "judge.restarts=1", "warmup.steps=1", "trainer.steps=3"),
        *("trainer.prompts_per_step=8", "evaluation.eval.before_train=false", "evaluation.eval.prompts=16"),
        *("trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1", "evaluation={}"),
    ]
    output = tmp_path / "output"
    with output.open("w") as out:
        training = subprocess.Popen(
            [warm_python(), *words], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _LIMIT_S
        while not any(line.get("step") == 1 and "reward/quality/mean" in line for line in logged(run)):
            assert training.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        server = server_of(run)
        os.kill(server, signal.SIGKILL)
        assert training.wait(_LIMIT_S) == 0, output.read_text()
    finally:
        training.kill()
        training.wait()
    steps = [line for line in logged(run) if "reward/quality/mean" in line and "judge/restarts" in line]
    assert [line["reward/quality/failed"] for line in steps] == [0, 0, 0], output.read_text()
    assert steps[0]["judge/restarts"] == 0 and steps[-1]["judge/restarts"] == 1
    assert all(0 <= line["reward/quality/mean"] <= 1 and line["reward/quality/input_tokens"] > 0 for line in steps)
    assert "its process was killed by SIGKILL" in (run / "logs/judge-0.log").read_text()
    assert "POST /v1/chat/completions" in (run / "logs/sglang-judge-0.log").read_text()
    assert server_of(run) != server and not psutil.pid_exists(server_of(run))


def logged(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def server_of(run: Path) -> int:
    """The process of the judge's server, as its log says."""
    return int(re.findall(r"Started server process \[(\d+)\]", (run / "logs/sglang-judge-0.log").read_text())[-1])
