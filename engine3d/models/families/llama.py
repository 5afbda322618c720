"""Llama (2, 3, 3.1, 3.2 text models)."""

from __future__ import annotations

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, attention_biases, dense_sizes, divided_head_dim


def sizes(config: HFConfig) -> Sizes:
    mlp_bias = config.flag("mlp_bias")
    if mlp_bias and not config.flag("attention_bias"):
        raise config.error("mlp_bias", "false where attention_bias is false")
    heads, divided = config.integer("num_attention_heads"), divided_head_dim(config)
    if config.integer("hidden_size") % heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={heads}")
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", heads, null=heads),
        head_dim=config.integer("head_dim", divided, null=divided),
        mlp_bias=mlp_bias,
        **attention_biases(config),
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    return blocks.layer_norms(sizes, sparse=False) + blocks.attention(sizes) + blocks.dense_mlp(sizes)


LLAMA = Family("llama", "LlamaForCausalLM", sizes, layer)
