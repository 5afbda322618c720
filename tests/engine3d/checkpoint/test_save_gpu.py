"""On GPUs: Transformer Engine's optimizers, which keep masters and moments in forms of their own, resume exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig
from tests.engine3d.checkpoint.writing.test_save import SETTINGS, _again, _elsewhere, _first, assert_same
from tests.support import tiny_families
from tests.support.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine"),
]
AWARE = OptimizerConfig(**SETTINGS.model_dump() | {"precision_aware": True})
CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "masters": ("deepseek_v3", 1, {}, {"dtype": "bfloat16"}),
    "precision-aware": ("qwen3_moe", 1, {}, {"dtype": "bfloat16", "optimizer": AWARE}),
    "in host memory": (
        "qwen3_moe",
        1,
        {},
        {"dtype": "bfloat16", "optimizer": AWARE.model_copy(update={"offload": True}), "recompute": "selective"},
    ),
    "two": ("qwen3_moe", 2, {"ep": 2}, {"dtype": "bfloat16", "optimizer": AWARE}),
}


def _deterministic(function: Any, *arguments: Any) -> Any:
    os.environ |= platform.training_environment(int(os.environ["WORLD_SIZE"]), deterministic=True)
    return function(*arguments)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_engine_equals_the_one_that_continued(name: str, tmp_path: Path) -> None:
    family, world_size, sizes, settings = CASES[name]
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    settings = settings | {"deterministic": True}
    model, root = tmp_path / "model", tmp_path / "checkpoints"
    tiny_families.make(family, model)
    arguments = (model, root, sizes, settings)
    first = run_distributed(_deterministic, world_size, _first, *arguments, timeout_s=240)
    again = run_distributed(_deterministic, world_size, _again, *arguments, timeout_s=240)
    for before, after in zip(first, again, strict=True):
        assert after["loaded"].same_layout
        assert after["updates"] == before["updates"]
    assert_same(root / "loaded", root / "background")
    assert_same(root / "end-again", root / "end")
    if world_size == 2:
        [other] = run_distributed(_deterministic, 1, _elsewhere, model, root, [{}], settings, timeout_s=240)
        assert other[0][0].optimizer_step == 2
        assert_same(root / "elsewhere-1-0", root / "background")
