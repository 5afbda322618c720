"""On a GPU: a whole run in which critic, reference and the engine's weights leave it between their turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.platform import platform
from tests.support.runs import ROOT, records, run_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not platform.gpus, reason="needs a GPU")]


def test_every_transfer_into_released_weights_is_proved(tmp_path: Path) -> None:
    """CUDA graphs that were captured before weights were released serve what is written after that."""
    ended = run_recipe(
        str(ROOT / "launch/recipes/h200-1gpu-ppo.yaml"),
        tmp_path,
        "placement.shared_gpus=true",  # other tests of this process may still hold some
        "trainer.steps=3",
        "trainer.prompts_per_step=32",
        "rollout.engine.deterministic=false",
        "critic.offload=true",
        "reference.offload=true",
        "rollout.engine.release_weights=true",
        "rollout.weights.share=false",
        "rollout.verify_weights=true",
        "checkpoint.save_interval=1",
    )
    assert ended.returncode == 0, ended.stderr
    for record in records(tmp_path / "small", "train"):
        for role in ("critic", "reference", "rollout"):
            assert record[f"memory/{role}_offloaded_bytes"] > 1e9
            assert record[f"memory/{role}_onload_ms"] > 0
        # What the engine samples from is what the trainer computes.
        assert record["mismatch/logprob_abs_diff_mean"] < 0.05
