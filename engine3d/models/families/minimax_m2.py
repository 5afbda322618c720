"""MiniMax-M2: experts chosen by biased sigmoid scores in every layer, and norms over all query and all key heads.

A part of each head turns with the position: `rotary_dim`. transformers reads `partial_rotary_factor` in its place.
"""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.families import deepseek_v3
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, dense_sizes

_PUBLISHED = {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
_EXPERTS = "block_sparse_moe"


def rotary_share(config: HFConfig) -> float:
    head_dim = config.integer("head_dim", 128)
    rotary = config.integer("rotary_dim", head_dim)
    if rotary > head_dim or rotary % 2:
        raise config.error("rotary_dim", f"an even number of at most head_dim={head_dim}")
    return rotary / head_dim


def sizes(config: HFConfig) -> Sizes:
    for key, value in _PUBLISHED.items():
        config.require(key, (value,), value)
    config.require("qk_norm_type", ("per_layer",), "per_layer")
    config.require("router_jitter_noise", (0, 0.0), 0.0)
    config.require("shared_intermediate_size", (0,), 0)
    config.require("tie_word_embeddings", (False,), False)  # SGLang's class has an output layer of its own
    if any(kind != 1 for kind in config.get("attn_type_list", [])):
        raise config.error("attn_type_list", "only 1, attention to all positions")
    experts, experts_per_token = config.integer("num_local_experts", 256), config.integer("num_experts_per_tok", 8)
    if not 2 <= experts_per_token <= experts:  # Megatron-Core leaves a single expert's weight as it is
        raise config.error("num_experts_per_tok", f"between 2 and num_local_experts={experts}")
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 8),
        head_dim=config.integer("head_dim", 128),
        norm_over_heads=True,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=config.integer("intermediate_size"),
        sparse=(True,) * config.integer("num_hidden_layers"),
        normalised_routing=True,
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    experts = blocks.routed_experts(sizes, _EXPERTS, ("w1", "w3", "w2"))
    bias = blocks.expert_bias(sizes, f"{_EXPERTS}.e_score_correction_bias")
    return blocks.layer_norms(sizes, sparse=True) + blocks.attention(sizes) + experts + bias


def megatron(sizes: Sizes) -> dict[str, Any]:
    return deepseek_v3.megatron(sizes) | {"moe_shared_expert_intermediate_size": None}


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    sizes,
    layer,
    megatron,
    ropes=("default",),
    rope_base=5e6,
    rotary_share=rotary_share,
    published=_PUBLISHED,
)
