"""On GPUs: losses of routers with Transformer Engine's layers, however samples are cut and experts spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.platform import platform
from tests.engine3d.models.experts.test_load_balance import _expected, _UpdateResult, _updates
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.gradients import slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine"),
]
CUTS: list[dict[str, Any]] = [
    {"micro_batch_tokens": 30},
    {"micro_batch_tokens": 1000},
    {"micro_batch_tokens": 30, "recompute": "full"},
]
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"sizes": {}, **cut} for cut in CUTS],
    2: [{"sizes": {"ep": 2}, **cut} for cut in CUTS],
}


def _wide(directory: Path, ways: list[dict[str, Any]]) -> list[_UpdateResult]:
    updates = _updates(directory, [way | {"dtype": "bfloat16"} for way in ways])
    return [
        _UpdateResult(
            [(tensor_slice, gradient.cpu()) for tensor_slice, gradient in update.gradients],
            update.routing,
            update.grad_norm,
        )
        for update in updates
    ]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_gradients_of_routers_are_those_of_the_whole_update(world_size: int, tmp_path: Path) -> None:
    """bfloat16 is off by a tenth, as it tips choices of experts; a loss per micro-batch would be by 1 or more."""
    if platform.gpus < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    gradients, statistics = _expected(tiny_families.make("qwen3_moe", tmp_path / "moe"))
    ranks = run_distributed(_wide, world_size, tmp_path / "moe", LAYOUTS[world_size], timeout_s=300)
    routers = {name for name in gradients if name.endswith("mlp.gate.weight")}
    assert routers
    for number, way in enumerate(LAYOUTS[world_size]):
        seen = set()
        for rank in ranks:
            result = rank[number]
            for tensor_slice, gradient in result.gradients:
                if tensor_slice.hf_name in routers:
                    seen.add(tensor_slice.hf_name)
                    right = gradients[tensor_slice.hf_name][slices(tensor_slice.hf_box)]
                    error = float(torch.linalg.vector_norm(gradient.float() - right) / torch.linalg.vector_norm(right))
                    print(f"{way} {tensor_slice.hf_name}: off by {error:.4f}")
                    assert error < 0.25, (way, tensor_slice.hf_name)
            for name in ("z", "sequence", "update"):
                assert getattr(result.routing, name) == pytest.approx(sum(statistics[name]) / 3, rel=0.02), (
                    way,
                    name,
                )
        assert seen == routers
