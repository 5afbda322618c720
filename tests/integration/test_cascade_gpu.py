"""On a GPU: a run whose engine reads once what samples share, and computes what the trainer does."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.platform import platform
from tests.support.runs import ROOT, records, run_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not platform.gpus, reason="needs a GPU")]


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_samples_that_share_a_prompt_have_the_trainers_logprobs(cuda_graph: bool, tmp_path: Path) -> None:
    ended = run_recipe(
        str(ROOT / "launch/recipes/h200-1gpu.yaml"),
        tmp_path,
        "placement.shared_gpus=true",  # other tests of this process may still hold some
        "trainer.steps=2",
        "trainer.prompts_per_step=32",
        "rollout.samples_per_prompt=8",
        "rollout.engine.deterministic=false",
        "rollout.engine.cascade_attention=true",
        f"rollout.engine.cuda_graph={str(cuda_graph).lower()}",
    )
    assert ended.returncode == 0, ended.stderr
    for record in records(tmp_path / "small", "train"):
        assert record["mismatch/logprob_abs_diff_mean"] < 0.05
    logs = [path.read_text() for path in (tmp_path / "small").rglob("sglang-*.log")]
    assert any("What requests share is read once for up to" in text for text in logs)
