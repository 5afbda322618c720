"""gpt-oss: attention sinks, sliding windows in some layers, and experts with biases and a limited SwiGLU.

A layer's experts are two tensors, with a bias each, of which one expert's matrices are the transposed weights of linear
layers; gate and up are columns in turn. Published files have them in MXFP4.
"""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, dense_sizes, local_experts

_PUBLISHED = {"swiglu_limit": 7.0}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def sizes(config: HFConfig) -> Sizes:
    for key, value in _PUBLISHED.items():
        config.require(key, (value,), value)
    config.require("hidden_act_alpha", (1.702,), 1.702)
    config.require("attention_bias", (True,), True)
    config.require("tie_word_embeddings", (False,), False)  # SGLang's class has an output layer of its own
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise config.error("rope_parameters", "an object with rope_type: transformers and SGLang have other defaults")
    layers = config.integer("num_hidden_layers", 36)
    kinds = config.texts("layer_types") or [_FULL if number % 2 else _WINDOWED for number in range(layers)]
    if len(kinds) != layers or not {_WINDOWED, _FULL}.issuperset(kinds):
        raise config.error("layer_types", f'{layers} of "{_WINDOWED}" and "{_FULL}", the number of layers')
    experts, experts_per_token = local_experts(config, 128, 4)
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 8),
        head_dim=config.integer("head_dim", 64),
        norm_epsilon=config.number("rms_norm_eps", 1e-5, most=1.0),
        qkv_bias=True,
        output_bias=True,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=config.integer("intermediate_size", 2880),
        expert_biases=True,
        sparse=(True,) * layers,
        normalised_routing=True,
        sinks=True,
        window=config.integer("sliding_window", 128),
        windowed=tuple(kind == _WINDOWED for kind in kinds),
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    return blocks.layer_norms(sizes, sparse=True) + blocks.attention(sizes) + blocks.stacked_experts(sizes)


def megatron(sizes: Sizes) -> dict[str, Any]:
    return {
        # The softmax over the chosen experts alone.
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_mlp_glu_interleave_size": 1,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": _PUBLISHED["swiglu_limit"],
    }


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    sizes,
    layer,
    megatron,
    ropes=("default", "yarn"),
    rope_base=150000.0,
    published=_PUBLISHED,
)
