"""Qwen2 and Qwen2.5, the dense models: biases in the projections to queries, keys and values alone."""

from __future__ import annotations

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, dense_sizes, divided_head_dim


def sizes(config: HFConfig) -> Sizes:
    # Neither transformers nor SGLang reads such a key of these models.
    config.require("attention_bias", (True,), True)
    heads = config.integer("num_attention_heads")
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 32, null=heads),
        head_dim=config.integer("head_dim", divided_head_dim(config)),
        qkv_bias=True,
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    return blocks.layer_norms(sizes, sparse=False) + blocks.attention(sizes) + blocks.dense_mlp(sizes)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", sizes, layer)
