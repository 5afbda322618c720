"""A model as transformers saves it, from the defaults of its config class, is one that SGLang builds and loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.models import FAMILIES, Family, check_weights, load_model_spec, model_spec, sglang_overrides
from engine3d.reshard.describe.simulate import trace_engine_layout
from engine3d.rollout import RolloutConfig, launch
from tests.support.tiny_families import CONFIGS

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
_GATED_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
}
_DELTA_NETS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": _GATED_EXPERTS,
    "qwen3_next": _DELTA_NETS | _GATED_EXPERTS,
    "qwen3_5_moe": _DELTA_NETS | _GATED_EXPERTS,
    "qwen3_5": _DELTA_NETS,
    "glm4_moe": {"moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
    },
}
"""Sizes that make a model small; all else is what the class has by default."""


def _save(family: Family, directory: Path) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sizes = SMALL | OF_FAMILY.get(family.name, {})
    if family.text is None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.name, **sizes))
    else:
        if "moe_intermediate_size" in sizes:
            del sizes["intermediate_size"]
        config = AutoConfig.for_model(family.name, text_config=sizes, vision_config=_TOWER)
        model = AutoModelForImageTextToText.from_config(config)
    model.float().save_pretrained(directory)
    saved: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return saved


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_sglang_builds_and_loads_what_transformers_saves(family: Family, tmp_path: Path) -> None:
    saved = _save(family, tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    spec = load_model_spec(tmp_path)
    check_weights(spec, tmp_path)
    model = launch.read_model(tmp_path, weights_needed=True)
    arguments = launch.server_arguments(RolloutConfig(dtype="float32"), model)
    assert model.overrides == sglang_overrides(saved)

    # As an engine reads the directory, with the arguments that it is started with.
    from sglang.srt.configs.model_config import ModelConfig

    overrides = arguments.get("json_model_override_args", "{}")
    config = ModelConfig(str(tmp_path), model_override_args=overrides, dtype="float32")
    assert config.num_hidden_layers == spec.sizes.layers
    assert not config.is_multimodal or arguments["enable_multimodal"] is False
    assert config.hf_config.architectures == [spec.family.architecture]
    for key, value in spec.family.published.items():
        assert getattr(config.hf_config, key) == value

    # And what its loader makes of the tensors.
    tensors = {name: (tensor.shape, torch.float32) for name, tensor in spec.hf_tensors.items()}
    traces = trace_engine_layout(
        saved, tensors, 2, 2 if spec.sizes.experts and not spec.sizes.expert_biases else 1, torch.float32
    )
    assert len(traces) == 2 and all(trace.holdings for trace in traces)
    assert (tmp_path / "config.json").read_bytes() == before


def test_only_what_lacks_is_completed() -> None:
    published = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    config = {"architectures": ["DeepseekV3ForCausalLM"]}
    assert sglang_overrides(config) == published
    assert sglang_overrides(config | {"scoring_func": "sigmoid", "moe_layer_freq": None}) == {
        key: value for key, value in published.items() if key != "scoring_func"
    }
    assert sglang_overrides(config | published) == {}
    assert sglang_overrides({"architectures": ["SomethingElseForCausalLM"]}) == {}


def test_engines_rotate_by_the_same_base_as_training_where_a_config_has_two() -> None:
    nested = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    config = CONFIGS["qwen3_next"] | {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_parameters": nested}
    served = config | sglang_overrides(config)
    assert served["rope_theta"] == model_spec(config).rope.base == 1e7
    assert "partial_rotary_factor" not in sglang_overrides(config)
