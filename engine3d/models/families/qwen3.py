"""Qwen3, the dense models."""

from __future__ import annotations

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, attention_biases, dense_sizes


def sizes(config: HFConfig) -> Sizes:
    groups = config.integer("num_key_value_heads", null=config.integer("num_attention_heads"))
    head_dim = config.integer("head_dim", 128)
    return dense_sizes(config, groups=groups, head_dim=head_dim, qk_norm=True, **attention_biases(config))


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    return blocks.layer_norms(sizes, sparse=False) + blocks.attention(sizes) + blocks.dense_mlp(sizes)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", sizes, layer)
