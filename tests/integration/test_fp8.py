"""Whole runs whose engines are in fp8: every transfer verified, half the bytes, and log-probs that are corrected."""

from __future__ import annotations

import json
import subprocess
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import logprobs
from benchmarks.kill_harness import Comparison, Kill, KilledRun, compare
from engine3d.checkpoint.hf import export_checkpoint
from engine3d.checkpoint.manifest import find_checkpoints
from engine3d.models import load_model_spec
from engine3d.models.precision import Fp8Settings, quantisation_config, quantise, scale_name, served_shapes
from hybridflow.cli.main import main
from tests.support.proves import proves
from tests.support.runs import ROOT, SMALL, records, rewarded_by_length, run_recipe
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes


FEATURES = (
    "train.packing=true",
    "train.recompute=full",
    "train.optimizer.offload=true",
    "train.routing_replay=update",
    "trainer.mini_batches=2",
    "rollout.engine.kv_cache_dtype=fp8_e4m3",
)

ADAPTERS = ("train.lora={rank: 8, alpha: 16}",)
LEFT_OUT = ("train.fp8.num_layers_at_end_in_bf16=1",)


@pytest.mark.parametrize(
    ("recipe", "features"),
    [
        pytest.param(
            "fp8",
            (),
            marks=[proves("qwen3_moe", "ep dp padding checkpoints resharding fp8"), pytest.mark.long],
        ),
        pytest.param(
            "fp8",
            FEATURES,
            marks=[
                proves(
                    "qwen3_moe",
                    "ep dp packing recomputation optimizer_offload routing_replay checkpoints resharding fp8",
                ),
                pytest.mark.release,
            ],
        ),
        pytest.param(
            "fp8-training",
            (),
            marks=[
                proves("qwen3_moe", "ep dp padding checkpoints resharding fp8 fp8_training"),
                pytest.mark.release,
            ],
        ),
        pytest.param(
            "fp8-training",
            LEFT_OUT,
            marks=[
                proves("qwen3_moe", "ep dp padding checkpoints resharding fp8 fp8_training fp8_exceptions"),
                pytest.mark.release,
            ],
        ),
        pytest.param(
            "fp8",
            ADAPTERS,
            marks=[proves("qwen3_moe", "ep dp padding checkpoints resharding fp8 lora"), pytest.mark.release],
        ),
    ],
    ids=["recipe", "features", "training", "left out", "adapters"],
)
def test_the_recipe_trains_with_engines_in_fp8(recipe: str, features: tuple[str, ...], tmp_path: Path) -> None:
    settings = [
        "rollout.engine.deterministic=false",
        "trainer.steps=2",
        "rollout.verify_weights=true",
        "evaluation.eval=null",
        "warmup.steps=2",
        "checkpoint.save_interval=1",
        *features,
    ]
    path = str(ROOT / f"launch/recipes/{recipe}.yaml")
    outcome = run_recipe(path, tmp_path, *settings, rewarded_by_length(tmp_path))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "without algorithm.correction" not in outcome.stdout + outcome.stderr
    trainer, cache = (
        "fp8" if recipe == "fp8-training" else "float32",
        "fp8_e4m3" if features == FEATURES else "bfloat16",
    )
    assert f"; mismatch of trainer {trainer}, engines fp8, KV cache {cache}\n" in outcome.stdout
    run = tmp_path / "small"
    steps = records(run, "train")
    fp8 = Fp8Settings(num_layers_at_end_in_bf16=int(features == LEFT_OUT))
    spec = fp8.applied(load_model_spec(run / "model"))
    quantised = sum(prod(tensor.shape) for tensor in spec.hf_tensors.values() if tensor.fp8)
    scales = sum(prod(shape) for name, shape in served_shapes(spec, "fp8").items() if name not in spec.hf_tensors)
    moved = quantised + 4 * scales + 2 * (spec.parameter_count() - quantised)
    assert len(steps) == 2
    for step in steps:
        assert step["sync/moved_bytes"] == moved and step["sync/aliased_bytes"] == 0
        assert 0 < step["mismatch/logprob_abs_diff_max"] < 0.5
        assert step["train/gradient_norm"] > 0
        assert any(name.startswith("correction/") for name in step), json.dumps(step)
    assert moved < (0.6 if features != LEFT_OUT else 0.8) * 2 * spec.parameter_count()
    if features == LEFT_OUT:
        export_checkpoint(find_checkpoints(run / "checkpoints")[0][0], tmp_path / "export", precision="fp8")
        config = json.loads((tmp_path / "export" / "config.json").read_text())
        assert config["quantization_config"] == quantisation_config(spec)
        assert spec.unquantised <= set(config["quantization_config"]["modules_to_not_convert"])
    if features == ADAPTERS:
        _merged_exports_are_quantised_as_they_are(find_checkpoints(run / "checkpoints")[0][0], tmp_path)


def _merged_exports_are_quantised_as_they_are(checkpoint: Path, directory: Path) -> None:
    """Compare exports with merged adapters, in fp8 and without."""
    for name, more in (("plain", []), ("fp8", ["--precision", "fp8"])):
        assert main(["checkpoint", "export", str(checkpoint), str(directory / name), "--merged", *more]) == 0
    plain, in_fp8 = (load_file(directory / name / "model.safetensors") for name in ("plain", "fp8"))
    spec = load_model_spec(directory / "plain")
    assert in_fp8.keys() == served_shapes(spec, "fp8").keys()
    for name, tensor in spec.hf_tensors.items():
        expected = {name: plain[name]}
        if tensor.fp8:
            values, scales = quantise(plain[name])
            expected = {name: values, scale_name(name): scales}
        for key, value in expected.items():
            assert value.dtype == in_fp8[key].dtype and torch.equal(value.float(), in_fp8[key].float()), key


@proves("qwen3_moe", "ep dp padding checkpoints resharding fp8 fp8_training fp8_exceptions")
@pytest.mark.release
def test_a_killed_run_resumes_and_its_checkpoints_and_exports_give_its_figures(tmp_path: Path) -> None:
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n + 1}=", "answer": 2 * n + 1}) + "\n" for n in range(12)))
    sums = {"data": {"path": str(rows)}, "samples": 4, "temperature": 1.0, "max_new_tokens": 4, "interval": 1}
    settings = [
        "evaluation.eval=null",
        f"evaluation.sums={json.dumps(sums)}",
        "trainer.steps=3",
        "warmup.steps=2",
        "checkpoint.save_interval=1",
        "rollout.engine.kv_cache_dtype=fp8_e4m3",
        rewarded_by_length(tmp_path),
        *LEFT_OUT,
    ]
    recipe = [str(ROOT / "launch/recipes/fp8-training.yaml"), *SMALL, *settings]
    plain, killed = (KilledRun(tmp_path / name, recipe, interpreter=warm_python()) for name in ("plain", "killed"))
    assert plain.run().exit_code == 0, plain.output
    outcome = killed.run(Kill("trainer", "update", 3, 0.0))
    assert outcome.killed and not outcome.left_over, killed.output
    assert killed.run().exit_code == 0, killed.output
    assert "resume: after step 2, " in killed.output
    assert compare(killed, plain) == Comparison(identical=True, lost=0, duplicated=0)

    run = plain.run_directory
    measured = json.loads((run / "checkpoints/step-00000003/driver.json").read_text())["last_measured"]["sums"]
    # The arithmetic that is trained on has five of the sums; an evaluation without training does not count them.
    assert measured["step"] == 3 and measured["statistics"].pop("training_prompts") == 5
    export_checkpoint(find_checkpoints(run / "checkpoints")[0][0], tmp_path / "export", precision="fp8")
    for target, more in ((run, []), (tmp_path / "export", ["--recipe", str(run / "recipe.yaml")])):
        out = tmp_path / f"of-{target.name}"
        words = ["-m", "hybridflow", "evaluate", str(target), "--set", "sums", "--out", str(out), *more]
        done = subprocess.run(
            [warm_python(), *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        evaluated = json.loads((out / "evaluation.json").read_text())["sets"]["sums"]
        assert evaluated["statistics"] == measured["statistics"]  # bit for bit: of the same quantised weights


STREAMED = (
    "rollout.stream.on_new_weights=resend",
    "rollout.weights.rolling=true",
    "train.routing_replay=rollout",
    "trainer.max_staleness=1",  # from the second update on the trainer waits for the engines
    "rollout.engine.max_running_requests=2",
    "rollout.sampling={max_new_tokens: 24, ignore_eos: true}",
    "train.optimizer={lr: 2.0e-3, warmup_steps: 0}",
    "placement.rollout=cpu:2-3",  # two engines
    "samples.keep_mb=null",
)


@proves("qwen3_moe", "ep dp padding routing_replay streams checkpoints resharding fp8 fp8_training")
@pytest.mark.long
def test_each_token_of_a_stream_was_drawn_with_the_quantised_weights_of_its_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 4
    settings = [
        "rollout.engine.deterministic=false",
        f"trainer.steps={steps}",
        "rollout.verify_weights=true",
        "evaluation.eval=null",
        "checkpoint.save_interval=1",
        *STREAMED,
    ]
    outcome = run_recipe(
        str(ROOT / "launch/recipes/fp8-training.yaml"), tmp_path, *settings, rewarded_by_length(tmp_path)
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    train = records(tmp_path / "small", "train")
    assert len(train) == steps and max(record["stream/mixed_versions_share"] for record in train) > 0
    assert all(record["train/missing_route_share"] == 0 for record in train)
    assert logprobs.main([str(tmp_path / "small"), "--samples", "1000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    distances = result["distances"]
    assert result["left_out"] == 0
    before = distances[logprobs.BEFORE]["mean"]
    for kind in (logprobs.FIRST, logprobs.LATER):
        assert distances[kind]["tokens"] > 0
        assert 4 * distances[kind]["mean"] < before, distances  # of activations in bfloat16
