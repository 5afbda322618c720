"""Streams of rollouts to actors of several families and layouts: each token's log-prob is that of its version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import logprobs
from hybridflow.config.initial_model import create_model
from hybridflow.roles.config import CreateModel, ModelConfig
from tests.support.proves import proves
from tests.support.runs import ROOT, records, rewarded_by_length, run_recipe
from tests.support.tiny_families import CONFIGS, family_of

pytestmark = [pytest.mark.processes, pytest.mark.long]

STEPS, SAMPLES, TOKENS = 4, 8 * 4, 32
SETTINGS = (
    f"trainer.steps={STEPS}",
    "train.packing=true",
    "train.recompute=full",
    "train.optimizer={offload: true, lr: 1.0e-3, warmup_steps: 0}",
    f"rollout.sampling={{max_new_tokens: {TOKENS}, ignore_eos: true}}",
    # From the second update on the trainer waits for the engine: a request is in flight whenever weights change.
    "trainer.max_staleness=1",
    "rollout.engine.max_running_requests=1",
    "checkpoint.save_interval=1",
    "samples.keep_mb=null",
    "rollout.engine.deterministic=false",  # which latent attention has on GPUs alone
    "evaluation.eval=null",
)
FEATURES = "packing recomputation optimizer_offload streams resharding"
CASES = {
    "llama": ("tp", "train.layout={tp: 2}", "rollout.stream.on_new_weights=resend"),
    "qwen3-tied": ("cp", "train.layout={ep: 1, cp: 2}", "rollout.stream.on_new_weights=recompute"),
    "qwen2-tied": ("tp", "train.layout={ep: 1, tp: 2}", "rollout.stream.on_new_weights=resend"),
    "mistral": ("pp", "train.layout={ep: 1, pp: 2}", "rollout.stream.on_new_weights=recompute"),
    "mixtral": ("ep dp", "train.layout={ep: 2}", "rollout.stream.on_new_weights=recompute"),
    "qwen2_moe": ("ep dp", "train.layout={ep: 2}", "rollout.stream.on_new_weights=resend"),
    "glm4_moe": ("tp ep", "train.layout={tp: 2, ep: 2}", "rollout.stream.on_new_weights=resend"),
    "deepseek_v3-queries": (
        "tp etp pp vpp stages routing_replay",
        "train.layout={ep: 1, tp: 2, etp: 2, pp: 2, vpp: 2, stages: [1, 1, 1, 1]}",
        "train.routing_replay=rollout",
        "placement={actor: cpu:0-3, rollout: cpu:4}",
        "rollout.stream.on_new_weights=resend",
    ),
    "qwen3_moe": (
        "cp ep routing_replay lora",
        "train.layout={ep: 2, cp: 2}",
        "train.routing_replay=rollout",
        "train.lora={rank: 8, alpha: 64}",
        "train.optimizer.lr=1.0e-2",
        "rollout.stream.on_new_weights=recompute",
    ),
    "llama adapter": (
        "tp lora",
        "train.layout={ep: 1, tp: 2}",
        "train.lora={rank: 8, alpha: 64, engine: adapter}",
        "train.optimizer.lr=1.0e-2",
        "rollout.verify_weights=true",
        "rollout.stream.on_new_weights=recompute",
    ),
    "qwen3_moe adapter": (
        "ep dp routing_replay lora",
        "train.layout={ep: 2}",
        "train.routing_replay=rollout",
        "train.lora={rank: 8, alpha: 64, engine: adapter}",
        "train.optimizer.lr=1.0e-2",
        "rollout.stream.on_new_weights=resend",
    ),
}
"""Items of the matrix and settings of each case, by the name of a model. With "adapter" engines add adapters."""
OF_LAYOUTS = ("glm4_moe", "deepseek_v3-queries", "qwen3_moe", "llama adapter")
"""Cases with all sizes of layouts between them, with both treatments of new weights, and with adapters in engines."""

SEEDS = {"qwen2_moe": 2}
"""Seeds other than 1, by whose weights two experts of a token have the same probability in float32."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            name,
            settings,
            marks=[
                proves(family_of(name.split()[0]), f"{items} {FEATURES}"),
                *[pytest.mark.release] * (name not in OF_LAYOUTS),
            ],
            id=name.replace(" ", "-"),
        )
        for name, (items, *settings) in CASES.items()
    ],
)
def test_each_token_was_drawn_with_the_weights_of_its_version(
    name: str, settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS[name.split()[0]] | {
        "vocab_size": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.05,
    }
    config |= {key: [] for key in config if key == "mlp_only_layers"}  # SGLang has experts in every layer
    create_model(ModelConfig(create=CreateModel(config=config)), tmp_path / "model", seed=SEEDS.get(name, 1))
    settings = ["model.create=null", f"model.path={tmp_path}/model", *SETTINGS, *settings]
    recipe = str(ROOT / "launch/recipes/stream.yaml")
    outcome = run_recipe(recipe, tmp_path, *settings, rewarded_by_length(tmp_path))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr

    train = records(tmp_path / "small", "train")
    assert len(train) == STEPS
    mixed = [record["stream/mixed_versions_share"] for record in train]
    assert max(mixed) > 0, mixed
    if "train.routing_replay=rollout" in settings:
        assert all(record["train/missing_route_share"] == 0 for record in train)
    assert logprobs.main([str(tmp_path / "small"), "--samples", "1000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    distances = result["distances"]
    of_version = (logprobs.FIRST, logprobs.LATER)
    assert sum(distances[kind]["tokens"] for kind in of_version) == STEPS * SAMPLES * TOKENS
    assert result["left_out"] == 0
    assert all(distances[kind]["most"] < 1e-4 for kind in of_version)
    assert distances[logprobs.BEFORE]["mean"] > 1e-3
