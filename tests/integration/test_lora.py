"""Whole runs of GRPO with adapters: transfers verified, and the actor without adapters as the reference."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine3d.checkpoint.adapters import export_merged
from engine3d.checkpoint.hf import export_checkpoint
from engine3d.errors import UserError
from hybridflow.cli.main import main
from hybridflow.metrics import names as metrics
from tests.support.proves import proves
from tests.support.runs import ROOT, records, rewarded_by_length, run_recipe

pytestmark = pytest.mark.processes


@proves("qwen3_moe", "ep dp packing checkpoints resharding lora")
def test_the_recipe_trains_adapters(tmp_path: Path) -> None:
    settings = [
        "trainer.steps=2",
        "trainer.mini_batches=1",
        "train.optimizer.warmup_steps=0",
        "rollout.verify_weights=true",
        "evaluation.eval=null",
    ]
    settings += ["warmup=null", "algorithm.kl_coef=0.1", "train.packing=true", "checkpoint.save_interval=2"]
    recipe = str(ROOT / "launch/recipes/lora.yaml")
    outcome = run_recipe(recipe, tmp_path, *settings, rewarded_by_length(tmp_path))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    first, second = records(tmp_path / "small", "train")
    for record in (first, second):
        assert record[metrics.MISMATCH_LOGPROB_MAX] < 1e-4
        assert record[metrics.TRAIN_GRADIENT_NORM] > 0
    # B is 0 at first, and the reference is the model without adapters.
    assert first[metrics.TRAIN_REFERENCE_KL] == 0
    assert second[metrics.TRAIN_REFERENCE_KL] > 0
    _exports_are_the_actor(tmp_path / "small", tmp_path)


def _exports_are_the_actor(run: Path, directory: Path) -> None:
    """Compare the exports of a checkpoint with each other: the adapter on the model by peft, and the merged model."""
    checkpoint = run / "checkpoints" / "step-00000002"
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    for option in ("--adapter", "--merged"):
        assert main(["checkpoint", "export", str(checkpoint), str(directory / option[2:]), option]) == 0
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(run / "initial", dtype=torch.float32)
        logits = [base(tokens).logits]
        logits.append(peft.PeftModel.from_pretrained(base, directory / "adapter")(tokens).logits)
        merged = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32)
        logits.append(merged(tokens).logits)
    assert float((logits[1] - logits[2]).abs().max()) < 1e-5
    assert float((logits[0] - logits[2]).abs().max()) > 1e-4
    with pytest.raises(UserError, match="expected --adapter or --merged"):
        export_checkpoint(checkpoint, directory / "plain")
    with pytest.raises(UserError, match="is not the model of the adapters"):
        export_merged(checkpoint, directory / "other", run / "model")
