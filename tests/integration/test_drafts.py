"""Whole runs with speculative decoding: engines draft with the layer for multi-token prediction of the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import logprobs
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.metrics import names as metrics
from tests.support.proves import proves
from tests.support.runs import DEMO, ROOT, records, rewarded_by_length, run_recipe
from tests.support.tiny_families import add_drafting_layer, make

pytestmark = [pytest.mark.processes, pytest.mark.long]

EXAMPLE = str(ROOT / "examples/drafts.yaml")
STEPS, DRAFTS, TOKENS = 4, 2, 12


def _run(name: str, directory: Path, *settings: str, knows: bool = True) -> list[dict[str, Any]]:
    """Run with drafts of a model that knows only the last token, as the layer does until the model is trained.

    Without `knows` the layer has a random projection, and the example trains it.
    """
    make(name, directory / "model", changes={"bos_token_id": 1, "eos_token_id": 2})
    add_drafting_layer(directory / "model", follows_token=True)
    if not knows:
        file = directory / "model" / "multi_token.safetensors"
        tensors = load_file(file)
        (projection,) = (name for name in tensors if name.endswith("eh_proj.weight"))
        tensors[projection] = torch.randn(tensors[projection].shape, generator=torch.Generator().manual_seed(0)) * 0.1
        save_file(tensors, file, metadata={"format": "pt"})
    make_character_tokenizer(ARITHMETIC_CHARACTERS, directory / "model")
    if knows:
        settings = ("train.optimizer={lr: 1.0e-3, warmup_steps: 0}", *settings)
    done = run_recipe(DEMO if knows else EXAMPLE, directory, *_settings(directory, *settings))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = records(directory / "small", "train")
    assert all(step[metrics.TRAIN_GRADIENT_NORM] > 0 for step in steps)
    if not knows:
        return steps
    assert len(steps) == STEPS
    # A stream may have drawn the samples of the last step before it.
    assert 1.1 < steps[0][metrics.ROLLOUT_ACCEPTANCE_LENGTH] < 1 + DRAFTS
    return steps


def _settings(directory: Path, *settings: str) -> tuple[str, ...]:
    return (
        "warmup=null",
        f"trainer.steps={STEPS}",
        "model.create=null",
        f"model.path={directory / 'model'}",
        "rollout.engine.deterministic=false",
        f"rollout.engine.draft_tokens={DRAFTS}",
        f"rollout.sampling={{temperature: 0.5, max_new_tokens: {TOKENS}, ignore_eos: true}}",
        "checkpoint.save_interval=1",
        "evaluation.eval=null",
        *settings,
        rewarded_by_length(directory),
    )


@proves("glm4_moe", "tp ep packing streams checkpoints resharding drafts")
def test_a_stream_draws_each_token_with_the_weights_of_its_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(
        "glm4_moe",
        tmp_path,
        f"train.layout={json.dumps({'tp': 2, 'ep': 2})}",
        "train.packing=true",
        "rollout.verify_weights=true",
        "rollout.stream={}",
        "placement.rollout=cpu:2",
        "trainer.max_staleness=1",
        "samples.keep_mb=null",
    )
    assert logprobs.main([str(tmp_path / "small"), "--samples", "1000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    of_version = [result["distances"][kind] for kind in (logprobs.FIRST, logprobs.LATER)]
    # No checkpoint has the weights of the first steps' tokens, which the run has begun with.
    compared = [distance for distance in of_version if distance]
    tokens = sum(distance["tokens"] for distance in compared)
    assert tokens >= STEPS // 2 * 8 * 4 * TOKENS and tokens + result["left_out"] == STEPS * 8 * 4 * TOKENS
    assert all(distance["most"] < 1e-4 for distance in compared)


@proves("deepseek_v3", "pp dp padding recomputation optimizer_offload checkpoints resharding drafts")
@pytest.mark.release
def test_engines_have_the_log_probs_of_a_pipeline(tmp_path: Path) -> None:
    steps = _run(
        "deepseek_v3",
        tmp_path,
        f"train.layout={json.dumps({'pp': 2})}",
        "placement.actor=cpu:0-3",
        "train.recompute=full",
        "train.optimizer.offload=true",
    )
    assert all(step[metrics.MISMATCH_LOGPROB_MAX] < 1e-4 for step in steps)


TRAINED = (
    "rollout.verify_weights=true",
    "placement.rollout=cpu:2",
)


@proves("glm4_moe", "tp ep packing checkpoints resharding drafts mtp")
def test_a_layer_that_is_trained_drafts_better_also_after_a_restart(tmp_path: Path) -> None:
    layout = f"train.layout={json.dumps({'tp': 2, 'ep': 2})}"
    steps = _run("glm4_moe", tmp_path, layout, *TRAINED, "trainer.steps=12", knows=False)
    _assert_learned(steps)
    done = run_recipe(EXAMPLE, tmp_path, *_settings(tmp_path, layout, *TRAINED, "trainer.steps=14"), "resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = records(tmp_path / "small", "train")
    assert resumed[:12] == steps and len(resumed) == 14
    _assert_learned(resumed)
    assert max(step[metrics.TRAIN_MTP_LOSS] for step in resumed[12:]) < 0.7 * steps[0][metrics.TRAIN_MTP_LOSS]


@proves("deepseek_v3", "dp packing streams checkpoints resharding drafts mtp")
@pytest.mark.release
def test_a_layer_is_trained_on_samples_of_a_stream(tmp_path: Path) -> None:
    stream = ("rollout.stream={}", "trainer.max_staleness=1", "train.layout={}", "train.packing=true")
    _assert_learned(_run("deepseek_v3", tmp_path, *TRAINED, *stream, "trainer.steps=12", knows=False))


def _assert_learned(steps: Sequence[dict[str, Any]]) -> None:
    """The layer's loss falls, and engines accept more of its drafts."""
    losses = [step[metrics.TRAIN_MTP_LOSS] for step in steps]
    # A stream may have drawn the samples of the last step before it.
    name = metrics.ROLLOUT_ACCEPTANCE_LENGTH
    accepted = [step[name] for step in steps if name in step]
    assert all(step[metrics.TRAIN_MTP_GRADIENT_NORM] > 0 for step in steps)
    assert max(losses[9:]) < 0.7 * losses[0], losses
    assert len(accepted) > 9 and accepted[0] < 1.05 and min(accepted[9:]) > 1.1, accepted
