"""Several actors at once, by the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.runs import ROOT, SMALL, records
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.long]

IPPO = ROOT / "launch/recipes/algorithms/ippo.yaml"
_PPO = """base: {ppo}
train: {{layout: {{ep: 1}}}}
critic: {{train: {{layout: {{ep: 1}}}}}}
placement: {{actor: cpu:0, rollout: cpu:0}}
"""
FEW = [*SMALL, "trainer.steps=2", "algorithm.critic_warmup_steps=0"]


def _command(recipe: Path, directory: Path, *overrides: str) -> list[str]:
    return ["-m", "hybridflow", "train", str(recipe), f"run_dir={directory}", *FEW, *overrides]


def _run(recipe: Path, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), *_command(recipe, directory, *overrides)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        check=False,
    )


def _timeless(directory: Path) -> list[dict[str, object]]:
    other = ("_ms", "_sec", "_mb", "_bytes")
    return [
        {name: value for name, value in record.items() if not name.endswith(other) and not name.startswith("sync/")}
        for record in records(directory, "sft", "train", "eval")
    ]


@pytest.mark.release
def test_each_actor_learns_as_if_it_were_alone(tmp_path: Path) -> None:
    """Bit for bit, though another learns at the same time; and one that fails ends the run with its own exit code."""
    (tmp_path / "bad.py").write_text("def score(generated_texts):\n    raise KeyError('no score')\n")
    done = _run(IPPO, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    for name in ("adder", "brief"):
        assert any(line.startswith(f"[{name}] ") and "train 2/2" in line for line in lines)
        assert len(records(tmp_path / "small" / name, "train")) == 2
    alone = tmp_path / "ppo.yaml"
    alone.write_text(_PPO.format(ppo=ROOT / "launch/recipes/ppo.yaml"))
    done = _run(alone, tmp_path, "name=alone")
    assert done.returncode == 0, done.stderr[-3000:]
    assert _timeless(tmp_path / "small/adder") == _timeless(tmp_path / "alone")

    bad = f'actors.brief.reward.functions=[{{name: bad, path: "{tmp_path}/bad.py:score", on_failure: stop}}]'
    done = _run(IPPO, tmp_path, "name=failing", bad, "trainer.steps=1000")
    assert done.returncode == 1
    assert "actor brief failed with exit code 1; the others are ended" in done.stdout + done.stderr
    assert "[adder] hybridflow: terminated" in done.stderr


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *_command(IPPO, tmp_path, "trainer.steps=1000")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        _wait_until(lambda: all((tmp_path / "small" / name / "logs").is_dir() for name in ("adder", "brief")))
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    _wait_until(lambda: not _left(tmp_path))


def _left(directory: Path) -> list[int]:
    """Processes that name the run's directory on their command line."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in word for word in process.info["cmdline"] or ())
    ]


def _wait_until(condition: object, limit_s: float = 480.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not within its limit"
        time.sleep(0.5)
