"""Whole runs of GRPO with adapters: transfers verified, and the actor without adapters as the reference."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.kill_harness import Comparison, Kill, KilledRun, compare
from engine3d.checkpoint.adapters import export_actor, export_merged
from engine3d.checkpoint.hf import export_checkpoint
from engine3d.errors import UserError
from hybridflow.cli.main import main
from hybridflow.metrics import names as metrics
from tests.support.proves import proves
from tests.support.runs import ROOT, SMALL, records, rewarded_by_length, run_recipe
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes


APART = "train.lora={engine: adapter, targets: [q_proj, v_proj, o_proj]}"
"""Adapters that engines get apart from the model."""
EXPERTS = "train.lora={engine: adapter, targets: [o_proj, gate_proj, up_proj, down_proj]}"
"""The same, of experts too."""


@proves("qwen3_moe", "ep dp packing checkpoints resharding lora")
@pytest.mark.long
@pytest.mark.parametrize("more", [[], [APART], [EXPERTS]], ids=["merged", "adapter", "experts"])
def test_the_recipe_trains_adapters(more: list[str], tmp_path: Path) -> None:
    settings = [
        "trainer.steps=2",
        "trainer.mini_batches=1",
        "train.optimizer.warmup_steps=0",
        "rollout.verify_weights=true",
        "evaluation.eval=null",
    ]
    settings += ["warmup=null", "algorithm.kl_coef=0.1", "train.packing=true", "checkpoint.save_interval=2"]
    recipe = str(ROOT / "launch/recipes/lora.yaml")
    outcome = run_recipe(recipe, tmp_path, *settings, *more, rewarded_by_length(tmp_path))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    first, second = records(tmp_path / "small", "train")
    for record in (first, second):
        assert record[metrics.MISMATCH_LOGPROB_MAX] < 1e-4
        assert record[metrics.TRAIN_GRADIENT_NORM] > 0
        if more == [APART]:  # A and B of q, v and o in float32, and nothing of the model
            sizes = [(96, 96), (96, 48), (96, 96)]
            assert record[metrics.SYNC_BYTES_MOVED] == 2 * 4 * sum(16 * (rows + columns) for rows, columns in sizes)
    # B is 0 at first, and the reference is the model without adapters.
    assert first[metrics.TRAIN_REFERENCE_KL] == 0
    assert second[metrics.TRAIN_REFERENCE_KL] > 0
    _exports_are_the_actor(tmp_path / "small", tmp_path)


@proves("qwen3_moe", "ep dp padding checkpoints resharding lora")
@pytest.mark.long
@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.release), [APART]], ids=["merged", "adapter"])
def test_a_run_that_is_killed_and_resumed_is_the_uninterrupted_one(more: list[str], tmp_path: Path) -> None:
    settings = ["warmup=null", "algorithm.kl_coef=0.1", "trainer.steps=3", "checkpoint.save_interval=1", *more]
    settings += ["train.optimizer.warmup_steps=0", rewarded_by_length(tmp_path)]
    recipe = [str(ROOT / "launch/recipes/lora.yaml"), *SMALL, *settings]
    plain, killed = (KilledRun(tmp_path / name, recipe, interpreter=warm_python()) for name in ("plain", "killed"))
    assert plain.run().exit_code == 0, plain.output
    for kill in (Kill("driver", "update", 2, 0.0), Kill("rollout", "update", 3, 0.0)):
        outcome = killed.run(kill)
        assert outcome.killed and not outcome.left_over, killed.output
    assert killed.run().exit_code == 0, killed.output
    assert "resume: after step 2, " in killed.output
    assert compare(killed, plain) == Comparison(identical=True, lost=0, duplicated=0)
    events = [(run.run_directory / "events.jsonl").read_text().splitlines() for run in (plain, killed)]
    # Digests of the adapters of each step among them.
    digests = [[line for line in lines if "digest" in line] for lines in events]
    assert digests[0] == digests[1] != []


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
    export_actor(checkpoint, directory / "actor", dtype="float32", multi_token=False)  # as evaluations and ends of runs
    files = [directory / name / "model.safetensors" for name in ("merged", "actor")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(UserError, match="expected --adapter or --merged"):
        export_checkpoint(checkpoint, directory / "plain")
    with pytest.raises(UserError, match="is not the model of the adapters"):
        export_merged(checkpoint, directory / "other", run / "model")
