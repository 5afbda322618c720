"""Process groups of layouts, one after another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine3d.layout import Layout
from engine3d.models import initialise_random, model_spec
from engine3d.training.config import TrainConfig
from engine3d.training.megatron import parallel
from engine3d.training.passes.sequences import Sequences
from tests.support import tiny_families
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.processes


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _wake_ups(seconds: float) -> float:
    """Wake-ups a second of the threads of this process while it sleeps, for longer on a busy machine."""

    def switches() -> int:
        lines = [line for task in Path("/proc/self/task").iterdir() for line in (task / "status").open()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

    before, began = switches(), time.monotonic()
    time.sleep(seconds)
    return (switches() - before) / (time.monotonic() - began)


def _wake_ups_of_groups() -> float:
    parallel.initialise(Layout(dp=2), seed=1, timeout_s=300)
    counted = _wake_ups(0.5)
    parallel.leave()
    return counted


def test_idle_groups_wake_one_thread_of_a_rank() -> None:
    # gloo wakes a device's thread 100 times a second; of 20 devices these were 1,000.
    assert max(run_distributed(_wake_ups_of_groups, 2, timeout_s=300)) < 400


def _thread_counts() -> list[int]:
    counts = []
    for layout in (Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2)):
        parallel.initialise(layout, seed=1, timeout_s=300)
        counts.append(_threads())
        parallel.release()
    counts.append(_threads())
    parallel.leave()
    return counts


def test_released_groups_leave_no_threads() -> None:
    for *counts, released in run_distributed(_thread_counts, 2, timeout_s=300):
        assert max(counts) - min(counts) < 10 and released < min(counts) - 20


def _loss(outputs: Any, columns: dict[str, Tensor]) -> tuple[Tensor, None]:
    return -(outputs.logprobs * columns["weights"]).sum(), None


def _thread_counts_of_engines(directory: Path) -> list[int]:
    from engine3d.training.engine import TrainEngine

    counts = []
    for _ in range(3):
        engine = TrainEngine(directory, TrainConfig(dtype="float32"), Layout())
        engine.update(Sequences.of([[3, 4, 5, 6]], weights=torch.ones(4)), _loss)
        engine.close()
        del engine
        counts.append(_threads())
    return counts


def test_engines_that_made_updates_leave_no_groups(tmp_path: Path) -> None:
    initialise_random(model_spec(tiny_families.CONFIGS["qwen3_moe"]), tmp_path / "model", seed=1, dtype=torch.float32)
    ((first, _, last),) = run_distributed(_thread_counts_of_engines, 1, tmp_path / "model", timeout_s=200)
    assert last - first < 20
