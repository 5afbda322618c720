"""On GPUs: Transformer Engine's layers and optimizers are away between turns, and compute the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig
from tests.engine3d.training.test_engine import SETTINGS
from tests.engine3d.training.test_offload import all_updated, check_same
from tests.support import tiny_families
from tests.support.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine"),
]
AWARE = OptimizerConfig(**SETTINGS.model_dump() | {"precision_aware": True})
CASES = {"masters": SETTINGS, "precision-aware": AWARE, "in host memory": AWARE.model_copy(update={"offload": True})}


def _deterministic(directory: Path, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    os.environ |= platform.training_environment(1, deterministic=True)
    return all_updated(directory, dtype="bfloat16", optimizer=optimizer, deterministic=True)


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_away_between_all_calls_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "moe")
    [results] = run_distributed(_deterministic, 1, tmp_path / "moe", CASES[name], timeout_s=300)
    check_same(results)
