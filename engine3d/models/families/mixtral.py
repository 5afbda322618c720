"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.families.mistral import check_attention
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, common_head_dim, dense_sizes, local_experts


def sizes(config: HFConfig) -> Sizes:
    check_attention(config, None)
    config.require("router_jitter_noise", (0, 0.0), 0.0)
    config.require("tie_word_embeddings", (False,), False)  # SGLang's class has an output layer of its own
    experts, experts_per_token = local_experts(config, 8, 2)
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 8),
        head_dim=common_head_dim(config, nullable=True),
        norm_epsilon=config.number("rms_norm_eps", 1e-5, most=1.0),
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=config.integer("intermediate_size"),
        sparse=(True,) * config.integer("num_hidden_layers"),
        normalised_routing=True,
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    experts = blocks.routed_experts(sizes, "block_sparse_moe", ("w1", "w3", "w2"))
    return blocks.layer_norms(sizes, sparse=True) + blocks.attention(sizes) + experts


def megatron(sizes: Sizes) -> dict[str, Any]:
    # The softmax over the chosen experts alone is the softmax over all of them, normalised over the chosen.
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}


# SGLang's class passes over scaled positions.
MIXTRAL = Family("mixtral", "MixtralForCausalLM", sizes, layer, megatron, ropes=("default",), rope_base=1e6)
