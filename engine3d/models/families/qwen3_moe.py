"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, attention_biases, dense_sizes, divided_head_dim


def expert_sizes(config: HFConfig, *, normalised: bool = False) -> dict[str, Any]:
    """The sizes of the experts, and which layers have them. Raises UserError as `dense_sizes` does.

    Args:
        config: of the model.
        normalised: `norm_topk_prob` where the config has none.
    """
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    experts = config.integer(key)
    experts_per_token = config.integer("num_experts_per_tok")
    if experts_per_token > experts:
        raise config.error("num_experts_per_tok", f"at most {key}={experts}")
    if experts_per_token == 1 and config.flag("norm_topk_prob", normalised):
        # The weight of a single expert is then 1 for every token: Megatron-Core refuses it, and no router is trained.
        raise config.error("num_experts_per_tok", "at least 2 with norm_topk_prob=true, or norm_topk_prob=false")
    step, dense_layers = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense_layers, list):
        raise config.error("mlp_only_layers", "a list of layer numbers")
    layers = config.integer("num_hidden_layers")
    return {
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_ffn": config.integer("moe_intermediate_size"),
        "sparse": tuple((number + 1) % step == 0 and number not in dense_layers for number in range(layers)),
        "normalised_routing": config.flag("norm_topk_prob", normalised),
    }


def sizes(config: HFConfig) -> Sizes:
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", divided_head_dim(config)),
        qk_norm=True,
        **expert_sizes(config),
        **attention_biases(config),
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    sparse = sizes.sparse[number]
    mlp = blocks.routed_experts(sizes) if sparse else blocks.dense_mlp(sizes)
    return blocks.layer_norms(sizes, sparse) + blocks.attention(sizes) + mlp


def megatron(sizes: Sizes) -> dict[str, Any]:
    # The softmax over the chosen experts alone is the softmax over all of them, normalised over the chosen.
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not sizes.normalised_routing}


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", sizes, layer, megatron)
