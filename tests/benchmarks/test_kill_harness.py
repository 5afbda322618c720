"""Accounts of the draws that a killed stream of rollouts was trained on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import kill_harness
from benchmarks.kill_harness import Account, KilledRun, account

STEPS, GROUPS, SAMPLES, PROMPTS = 2, 3, 2, 4
OF_STEPS = {1: {0: 2, 1: 0, 3: 1}, 2: {2: 3, 4: 1, 5: 0}}
"""The prompt of each draw that a step learns from: an epoch of four, and half of the next."""


def _kept(directory: Path, steps: Mapping[int, Mapping[int, int]], logged: list[int]) -> KilledRun:
    run = KilledRun(directory, ["recipe.yaml", "name=killed"])
    (run.run_directory / "samples").mkdir(parents=True)
    for step, draws in steps.items():
        rows = [(step, draw, prompt) for draw, prompt in draws.items() for _ in range(SAMPLES)]
        names = ("step", "group_id", "prompt_index")
        columns = {name: [row[column] for row in rows] for column, name in enumerate(names)}
        columns |= {"policy_version": [0] * len(rows), "newest_version": [0, 1] * (len(rows) // 2)}
        pq.write_table(pa.table(columns), run.run_directory / "samples" / f"step-{step:08d}.parquet")
    lines = [json.dumps({"phase": "train", "step": step}) + "\n" for step in logged]
    (run.run_directory / "metrics.jsonl").write_text("".join(lines))
    return run


@pytest.mark.parametrize(
    ("steps", "logged", "expected"),
    [
        pytest.param(OF_STEPS, [1, 2], Account(6, 0, 0, 6), id="all once"),
        # The draw, and its prompt of the epoch.
        pytest.param({1: OF_STEPS[1], 2: {4: 1, 5: 0}}, [1, 2], Account(5, 2, 0, 5), id="a draw lost"),
        pytest.param(
            {1: OF_STEPS[1], 2: OF_STEPS[2] | {1: 0}}, [1, 2], Account(6, 0, SAMPLES + 1, 7), id="a draw in two steps"
        ),
        # A prompt is missing in the first epoch where another is there twice.
        pytest.param({1: {0: 2, 1: 0, 3: 0}, 2: OF_STEPS[2]}, [1, 2], Account(6, 1, 1, 6), id="a prompt drawn again"),
        pytest.param(OF_STEPS, [2, 2], Account(6, 1, 1, 6), id="a step told twice and one not"),
        pytest.param({1: OF_STEPS[1], 2: OF_STEPS[2] | {6: 1}}, [1, 2], Account(7, 0, 1, 7), id="more than was drawn"),
    ],
)
def test_every_draw_is_accounted_for(
    steps: Mapping[int, Mapping[int, int]], logged: list[int], expected: Account, tmp_path: Path
) -> None:
    run = _kept(tmp_path, steps, logged)
    assert account(run, steps=STEPS, groups=GROUPS, samples=SAMPLES, prompts=PROMPTS) == expected


HOLDS = """
import multiprocessing, time
held = multiprocessing.get_context("spawn").Semaphore()
print(held._semlock.name, flush=True)
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("of_this_run", [False, True])
def test_a_semaphore_that_a_kill_leaves_is_the_runs_own_or_anothers(
    tmp_path: Path, of_this_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_harness, "_LOOK_S", 1e6)  # a new file makes it look
    run = KilledRun(tmp_path / "run", ["recipe.yaml", "name=small"])
    environment = os.environ | ({kill_harness._MARK: str(run.directory)} if of_this_run else {})
    command = [sys.executable, "-c", HOLDS]
    with (
        run.watching_others(),
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as holder,
    ):
        assert holder.stdout is not None
        name = f"sem.{holder.stdout.readline().decode().strip().lstrip('/')}"
        number, deadline = Path(f"/dev/shm/{name}").stat().st_ino, time.monotonic() + (1 if of_this_run else 120)
        while number not in run._of_others and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(holder.pid, signal.SIGKILL)  # with the process that would remove it
    try:
        assert (f"shared memory {name}" in run.left_over(0.0)) == of_this_run
    finally:
        Path(f"/dev/shm/{name}").unlink()
