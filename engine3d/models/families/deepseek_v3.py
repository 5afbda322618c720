"""DeepSeek-V3 (and Kimi-K2, Moonlight): latent attention, and experts chosen by biased sigmoid scores within groups.

The norms of the latent elements have the config's epsilon, as in SGLang; transformers has 1e-6 there in every model.
Layers for multi-token prediction are not part of the model: exports have their tensors as they are (`multi_token`).
"""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Latent, Sizes, decoder_sizes

_PUBLISHED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

_SCORES_PER_GROUP = 2
"""A group is chosen by the sum of its best scores: this many."""


def sizes(config: HFConfig) -> Sizes:
    config.require("attention_bias", (False,), False)
    config.require("rope_interleave", (True,), True)
    for key, value in _PUBLISHED.items():
        config.require(key, (value,), value)
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", null=heads) != heads:
        raise config.error("num_key_value_heads", f"num_attention_heads={heads}")
    latent = Latent(
        query_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        key_value_rank=config.integer("kv_lora_rank"),
        rotary_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )
    if latent.rotary_dim % 2:
        raise config.error("qk_rope_head_dim", "an even number")
    return decoder_sizes(
        config,
        heads=heads,
        groups=heads,
        head_dim=config.integer("qk_nope_head_dim") + latent.rotary_dim,
        latent=latent,
        **expert_sizes(config),
    )


def expert_sizes(config: HFConfig) -> dict[str, Any]:
    """The sizes and the routing of the experts, and which layers have them. Raises UserError as `dense_sizes` does."""
    layers = config.integer("num_hidden_layers")
    dense = config.get("first_k_dense_replace")
    if not isinstance(dense, int) or isinstance(dense, bool) or not 0 <= dense < layers:
        raise config.error("first_k_dense_replace", f"a whole number below num_hidden_layers={layers}")
    expert_ffn = config.integer("moe_intermediate_size")
    return {
        "expert_ffn": expert_ffn,
        "shared_ffn": config.integer("n_shared_experts") * expert_ffn,
        "sparse": tuple(number >= dense for number in range(layers)),
        **_routing(config),
    }


def _routing(config: HFConfig) -> dict[str, Any]:
    # Megatron-Core's sigmoid router always normalises, and leaves a single expert's weight as it is.
    if not config.flag("norm_topk_prob", True):
        raise config.error("norm_topk_prob", "true")
    experts, experts_per_token = config.integer("n_routed_experts"), config.integer("num_experts_per_tok")
    groups = config.integer("n_group")
    groups_per_token = config.integer("topk_group")
    if experts % groups:
        raise config.error("n_group", f"a divisor of n_routed_experts={experts}")
    if groups_per_token > groups:
        raise config.error("topk_group", f"at most n_group={groups}")
    available = experts // groups * groups_per_token
    if not 2 <= experts_per_token <= available:
        raise config.error("num_experts_per_tok", f"between 2 and the {available} experts of topk_group groups")
    # Megatron-Core chooses a group by as many scores as a token has experts in it.
    if groups_per_token < groups and experts_per_token // groups_per_token != _SCORES_PER_GROUP:
        raise config.error("topk_group", f"n_group={groups}, or half of num_experts_per_tok={experts_per_token}")
    return {
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_groups": groups,
        "groups_per_token": groups_per_token,
        "routing_scale": config.number("routed_scaling_factor"),
        "normalised_routing": True,
    }


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    assert sizes.latent is not None
    sparse = sizes.sparse[number]
    experts = blocks.routed_experts(sizes) + blocks.expert_bias(sizes) + blocks.shared_expert(sizes)
    mlp = experts if sparse else blocks.dense_mlp(sizes)
    return blocks.layer_norms(sizes, sparse) + blocks.latent_attention(sizes, sizes.latent) + mlp


def megatron(sizes: Sizes) -> dict[str, Any]:
    limited = sizes.groups_per_token < sizes.expert_groups
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # The policy changes by the gradient alone, unless a run asks for more.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": sizes.expert_groups if limited else None,
        "moe_router_group_topk": sizes.groups_per_token if limited else None,
        "moe_router_topk_scaling_factor": sizes.routing_scale,
        "moe_shared_expert_intermediate_size": sizes.shared_ffn,
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    sizes,
    layer,
    megatron,
    ropes=("default", "yarn"),
    published=_PUBLISHED,
    other_names=("kimi_k2",),
)
