"""GLM-4.5, 4.6 and their Air models: DeepSeek-V3's experts, and grouped-query attention that turns a part of each head.

Layers for multi-token prediction are not part of the model: their tensors in files are left alone.
"""

from __future__ import annotations

from engine3d.models import blocks
from engine3d.models.families import deepseek_v3
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, dense_sizes, divided_head_dim


def sizes(config: HFConfig) -> Sizes:
    config.require("scoring_func", ("sigmoid",), "sigmoid")  # which neither transformers nor SGLang reads
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 8),
        head_dim=config.integer("head_dim", divided_head_dim(config)),
        norm_epsilon=config.number("rms_norm_eps", 1e-5, most=1.0),
        qk_norm=config.flag("use_qk_norm"),
        qkv_bias=config.flag("attention_bias"),
        **deepseek_v3.expert_sizes(config),
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    sparse = sizes.sparse[number]
    experts = blocks.routed_experts(sizes) + blocks.expert_bias(sizes) + blocks.shared_expert(sizes)
    mlp = experts if sparse else blocks.dense_mlp(sizes)
    return blocks.layer_norms(sizes, sparse) + blocks.attention(sizes) + mlp


GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", sizes, layer, deepseek_v3.megatron, ropes=("default",), rotary_share=0.5
)
