"""Refusals of adapters, and their tensors, from shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import load_model_spec, model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.peft_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, PREFIX
from engine3d.models.lora.spec import AdapterSpec, linear_layers, module_name, target_names
from engine3d.training.config import TrainConfig
from engine3d.training.megatron.settings import check_options
from tests.support import tiny_families
from tests.support.tiny_families import CONFIGS

SPEC = model_spec(CONFIGS["deepseek_v3"])


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ("gate",)}, r"lora.targets: gate matches no linear layer of DeepseekV3ForCausalLM"),
        ({"targets": ("lm_head",)}, r"lora.targets: lm_head matches no linear layer"),
        ({"rank": 20}, r"lora.rank=20: expected at most 16, the smaller side of kv_b_proj \(\d+ x 16\)"),
        ({"rank": 4, "dropout": 0.1}, r"lora.dropout=0.1: .*; expected 0"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(lora: dict[str, Any], message: str) -> None:
    config = TrainConfig(lora=LoraConfig(**lora))
    with pytest.raises(UserError, match=message):
        check_options(config, SPEC, Layout(), transformer_engine=False)


def test_a_bias_that_updates_change_is_refused_with_adapters() -> None:
    config = TrainConfig(lora=LoraConfig(rank=4), megatron={"moe_router_bias_update_rate": 0.1})
    with pytest.raises(UserError, match="changes biases of the model"):
        check_options(config, SPEC, Layout(), transformer_engine=False)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("qwen3_moe", Layout(ep=2, dp=2), "lora on 2 GPUs was not tried; expected one GPU"),
        ("deepseek_v3", Layout(), r"latent attention \(DeepseekV3ForCausalLM\) was not tried on a GPU"),
    ],
)
def test_adapters_are_refused_where_no_gpu_has_run_them(name: str, layout: Layout, message: str) -> None:
    config, spec = TrainConfig(lora=LoraConfig(rank=4)), model_spec(CONFIGS[name])
    check_options(config, spec, layout, transformer_engine=False)
    check_options(config, model_spec(CONFIGS["qwen3_moe"]), Layout(), transformer_engine=True)
    with pytest.raises(UserError, match=message):
        check_options(config, spec, layout, transformer_engine=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_with_adapters_are_not_fused(name: str) -> None:
    for rule, tensor in linear_layers(model_spec(CONFIGS[name]).rules):
        target = module_name(tensor.name).rpartition(".")[2]
        assert LoraConfig(targets=(target,)).adapts_mlps == (".mlp." in rule.name), tensor.name
    assert LoraConfig().adapts_mlps


@pytest.mark.parametrize(
    ("changes", "lora", "message"),
    [
        ({}, {"rank": 8}, r"adapter_config.json: r: expected 8 \(lora.rank\), found 4"),
        ({"lora_alpha": 1}, {}, r"adapter_config.json: lora_alpha: expected 32.0 \(lora.alpha\), found 1"),
        ({"use_dora": True}, {}, "adapter_config.json: use_dora=True is not supported; expected null or false"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "adapter_config.json: init_lora_weights: 'pissa_niter_4' changes"),
        ({"shape": 3}, {}, "adapter_config.json: unknown key shape; expected those of peft.LoraConfig"),
        ({}, {"targets": ("up_proj", "o_proj")}, r"has no .*o_proj.lora_A.weight; expected a tensor of each module"),
        ({}, {"model": "qwen3_moe"}, r"adapter_model.safetensors: .* is of no module of lora.targets|has no "),
    ],
)
def test_a_directory_of_peft_that_does_not_fit_is_refused(
    changes: dict[str, Any], lora: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = {"rank": 4, "alpha": 32.0, "targets": ("up_proj",)}
    stored = AdapterSpec.of(SPEC, LoraConfig(**settings))
    tensors = {PREFIX + name: torch.zeros(tensor.shape) for name, tensor in stored.hf_tensors.items()}
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 32, "use_dora": False}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | changes))
    check_options(TrainConfig(lora=LoraConfig(**settings)), SPEC, Layout(), transformer_engine=False)
    spec = model_spec(CONFIGS[lora.pop("model", "deepseek_v3")])
    with pytest.raises(UserError, match=f"^lora.path: {tmp_path}/.*({message})"):
        check_options(
            TrainConfig(lora=LoraConfig(**settings | lora, path=tmp_path)), spec, Layout(), transformer_engine=False
        )


def test_adapters_of_another_model_of_the_same_shapes_are_refused(tmp_path: Path) -> None:
    models = [tmp_path / "first", tmp_path / "second"]
    for seed, model in enumerate(models):
        tiny_families.make("llama", model, seed=seed)
    lora = LoraConfig(rank=4, alpha=32.0, targets=("up_proj",), path=tmp_path)
    spec = load_model_spec(models[0])
    tensors = {
        PREFIX + name: torch.zeros(tensor.shape) for name, tensor in AdapterSpec.of(spec, lora).hf_tensors.items()
    }
    with TensorFiles(models[0]) as files:
        save_file(tensors, tmp_path / ADAPTER_WEIGHTS, metadata={BASE: files.fingerprint()})
    config = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 32}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    check_options(TrainConfig(lora=lora), spec, Layout(), transformer_engine=False)
    with pytest.raises(UserError, match=f"adapters of the model sampled-sha256:.*, but {models[1]} is sampled-sha256"):
        check_options(TrainConfig(lora=lora), load_model_spec(models[1]), Layout(), transformer_engine=False)


def test_tensors_have_the_names_of_peft() -> None:
    assert target_names(SPEC) == (
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    adapters = AdapterSpec.of(SPEC, LoraConfig(rank=4, targets=("up_proj",)))
    experts, layers = SPEC.sizes.experts, SPEC.sizes.layers
    assert len(adapters.hf_tensors) == 2 * (1 + (layers - 1) * (experts + 1))  # one dense layer, shared experts
    assert adapters.hf_shape("model.layers.1.mlp.experts.7.up_proj.lora_A.weight") == (4, SPEC.sizes.hidden)
    assert adapters.hf_shape("model.layers.1.mlp.experts.7.up_proj.lora_B.weight") == (SPEC.sizes.expert_ffn, 4)
