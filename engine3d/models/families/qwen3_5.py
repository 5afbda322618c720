"""Qwen3.5: the layers of Qwen3-Next, with a dense MLP or with experts, as the language model next to a vision tower.

A gated delta net has its projections as four tensors, each by heads. Positions of text are the same in all three
sections of its rotary embeddings, which are then plain ones. The vision tower and layers for multi-token prediction are
not trained: exports have their tensors as they are (`multi_token`).
"""

from __future__ import annotations

from typing import Any

from engine3d.models import blocks
from engine3d.models.families import qwen2_moe
from engine3d.models.families.qwen3_next import delta_sizes, shared_expert_sizes
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import HeadRows, HFTensor, Rule
from engine3d.models.sizes import Delta, Sizes, dense_sizes

_ROTARY_SHARE = 0.25
_COMMON = {
    "attention_bias": False,
    "attn_output_gate": True,
    "decoder_sparse_step": 1,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""Keys of which transformers or SGLang knows one value, and that value."""


def sizes(config: HFConfig) -> Sizes:
    return _sizes(config, groups=config.integer("num_key_value_heads", 4))


def expert_sizes(config: HFConfig) -> Sizes:
    return _sizes(
        config,
        groups=config.integer("num_key_value_heads", 2),
        ffn=config.integer("moe_intermediate_size"),  # no layer has a dense MLP
        **shared_expert_sizes(config),
    )


def _sizes(config: HFConfig, *, groups: int, **others: Any) -> Sizes:
    for key, value in _COMMON.items():
        config.require(key, (value,), value)
    config.require("output_gate_type", ("silu", "swish"), "silu")
    head_dim = config.integer("head_dim", 256)
    _check_rope(config, head_dim)
    return dense_sizes(config, groups=groups, head_dim=head_dim, **delta_sizes(config), **others)


def _check_rope(config: HFConfig, head_dim: int) -> None:
    """Refuse rotary embeddings that SGLang's class reads otherwise than transformers."""
    values = config.get("rope_parameters")
    if not isinstance(values, dict) or values.get("rope_theta") is None:
        raise config.error("rope_parameters", "an object with rope_theta")
    config.require("rope_scaling", (None,))
    share, beside = values.get("partial_rotary_factor"), config.get("partial_rotary_factor", _ROTARY_SHARE)
    if share is not None and share != beside:
        raise config.error("partial_rotary_factor", f"{share}, as rope_parameters has it")
    sections = values.get("mrope_section")
    if sections is None:
        return
    counts = sections if isinstance(sections, list) and all(type(count) is int for count in sections) else []
    if len(counts) != 3 or min(counts) < 0 or sum(counts) != int(head_dim * beside) // 2:
        raise config.error(
            "rope_parameters", "mrope_section of three numbers that add up to half of the rotary elements of a head"
        )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    attention = blocks.attention(sizes)
    if (linear := sizes.is_linear(number)) and sizes.delta is not None:
        attention = blocks.delta_net(sizes, sizes.delta, _projections(sizes, sizes.delta))
    sparse = sizes.is_sparse(number)
    experts = (*blocks.routed_experts(sizes), *blocks.shared_expert(sizes, "shared_expert")) if sparse else ()
    return blocks.layer_norms(sizes, sparse, linear) + attention + (experts or blocks.dense_mlp(sizes))


def _projections(sizes: Sizes, delta: Delta) -> tuple[HeadRows, ...]:
    """Rows of queries, keys and values, which are one tensor, and of output gates, betas and decays."""

    def tensor(name: str, rows: int) -> HFTensor:
        return HFTensor(f"{blocks.DELTA_NET}{name}.weight", (rows, sizes.hidden))

    mixed = tensor("in_proj_qkv", 2 * delta.keys + delta.values)
    return (
        HeadRows(mixed, delta.key_heads, delta.key_dim),
        HeadRows(mixed, delta.key_heads, delta.key_dim, delta.keys),
        HeadRows(mixed, delta.value_heads, delta.value_dim, 2 * delta.keys),
        HeadRows(tensor("in_proj_z", delta.values), delta.value_heads, delta.value_dim),
        HeadRows(tensor("in_proj_b", delta.value_heads), delta.value_heads, 1),
        HeadRows(tensor("in_proj_a", delta.value_heads), delta.value_heads, 1),
    )


QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    sizes,
    layer,
    ropes=("default",),
    rotary_share=_ROTARY_SHARE,
    multi_token="mtp.",
    text="qwen3_5_text",
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    expert_sizes,
    layer,
    qwen2_moe.megatron,
    ropes=("default",),
    rotary_share=_ROTARY_SHARE,
    multi_token="mtp.",
    text="qwen3_5_moe_text",
)
