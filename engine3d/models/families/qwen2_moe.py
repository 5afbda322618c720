"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts, and a shared expert whose output a gate of the token scales."""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.families import qwen3_moe
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, common_head_dim, dense_sizes


def sizes(config: HFConfig) -> Sizes:
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 16),
        head_dim=common_head_dim(config),
        qkv_bias=config.flag("qkv_bias", True),
        shared_ffn=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        **qwen3_moe.expert_sizes(config),
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    sparse = sizes.sparse[number]
    experts = blocks.routed_experts(sizes) + blocks.shared_expert(sizes, "shared_expert")
    mlp = experts if sparse else blocks.dense_mlp(sizes)
    return blocks.layer_norms(sizes, sparse) + blocks.attention(sizes) + mlp


def megatron(sizes: Sizes) -> dict[str, Any]:
    return {
        **qwen3_moe.megatron(sizes),
        "moe_shared_expert_intermediate_size": sizes.shared_ffn,
        "moe_shared_expert_gate": True,
    }


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", sizes, layer, megatron)
