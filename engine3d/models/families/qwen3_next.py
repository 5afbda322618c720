"""Qwen3-Next: gated delta nets, in every fourth layer attention with an output gate, and experts in all layers.

Norms have weights around zero. A layer's experts have a shared one next to them, whose output a gate of the token
scales. Layers for multi-token prediction are not part of the model: exports have their tensors as they are
(`multi_token`).
"""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.families import qwen2_moe, qwen3_moe
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import HeadRows, HFTensor, Rule
from engine3d.models.sizes import Delta, Sizes, dense_sizes

_PUBLISHED = {"full_attention_interval": 4}
_LINEAR, _FULL = "linear_attention", "full_attention"


def sizes(config: HFConfig) -> Sizes:
    # Of these SGLang's class has no others.
    config.require("decoder_sparse_step", (1,), 1)
    config.require("mlp_only_layers", ([],), [])
    config.require("attention_bias", (False,), False)
    config.require("tie_word_embeddings", (False,), False)
    config.require("output_gate_type", ("silu", "swish"), "silu")
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 2),
        head_dim=config.integer("head_dim", 256),
        **delta_sizes(config),
        **shared_expert_sizes(config),
    )


def delta_sizes(config: HFConfig) -> dict[str, Any]:
    """The sizes of gated delta nets, which layers have them, and the switches of gated attention."""
    interval, layers = _PUBLISHED["full_attention_interval"], config.integer("num_hidden_layers")
    if config.integer("full_attention_interval", interval) != interval:
        raise config.error("full_attention_interval", str(interval))
    kinds = [_LINEAR if (number + 1) % interval else _FULL for number in range(layers)]
    if config.get("layer_types", kinds) != kinds:
        raise config.error("layer_types", f'"{_FULL}" in every fourth layer, "{_LINEAR}" in all others')
    delta = Delta(
        key_heads=config.integer("linear_num_key_heads", 16),
        value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        kernel=config.integer("linear_conv_kernel_dim", 4),
        linear=tuple(kind == _LINEAR for kind in kinds),
    )
    if delta.value_heads % delta.key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads={delta.key_heads}")
    return {"delta": delta, "qk_norm": True, "output_gate": True, "centred_norms": True}


def shared_expert_sizes(config: HFConfig) -> dict[str, Any]:
    """The sizes of routed experts, whose weights add up to one, and of the gated shared expert."""
    return {
        **qwen3_moe.expert_sizes(config, normalised=True),
        "shared_ffn": config.integer("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    attention = blocks.attention(sizes)
    if (linear := sizes.is_linear(number)) and sizes.delta is not None:
        attention = blocks.delta_net(sizes, sizes.delta, _projections(sizes, sizes.delta))
    experts = blocks.routed_experts(sizes) + blocks.shared_expert(sizes, "shared_expert")
    return blocks.layer_norms(sizes, sparse=True, linear=linear) + attention + experts


def _projections(sizes: Sizes, delta: Delta) -> tuple[HeadRows, ...]:
    """Rows of two tensors that have, key head by key head, its query, key, values and gates; and betas and decays."""
    per_key = delta.value_heads // delta.key_heads
    keys, values = delta.key_dim, per_key * delta.value_dim

    def rows(name: str, *sizes_of_head: int) -> tuple[HeadRows, ...]:
        step = sum(sizes_of_head)
        tensor = HFTensor(f"{blocks.DELTA_NET}{name}.weight", (delta.key_heads * step, sizes.hidden))
        firsts = [sum(sizes_of_head[:index]) for index in range(len(sizes_of_head))]
        return tuple(
            HeadRows(tensor, delta.key_heads, size, first, step)
            for size, first in zip(sizes_of_head, firsts, strict=True)
        )

    return rows("in_proj_qkvz", keys, keys, values, values) + rows("in_proj_ba", per_key, per_key)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    sizes,
    layer,
    qwen2_moe.megatron,
    ropes=("default",),
    rotary_share=0.25,
    published=_PUBLISHED,
    flat_rope=True,
    multi_token="mtp.",
)
