"""Mistral without sliding windows, of which SGLang's class has none."""

from __future__ import annotations

from engine3d.models import blocks
from engine3d.models.family import Family
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rules import Rule
from engine3d.models.sizes import Sizes, dense_sizes, divided_head_dim

_ABSENT_WINDOW = 4096
"""Tokens of the window that transformers reads where the config has no such key."""


def check_attention(config: HFConfig, absent_window: int | None) -> None:
    """Refuse biases, and windows that are shorter than a sequence may be.

    Args:
        config: of the model.
        absent_window: tokens of the window where the config has no such key; None for no window.

    Raises:
        UserError: names the key.
    """
    config.require("attention_bias", (False,), False)
    positions = config.integer("max_position_embeddings")
    window = config.values.get("sliding_window", absent_window)
    if window is not None and not (type(window) is int and window >= positions):
        raise config.error("sliding_window", f"null, or at least max_position_embeddings={positions}")


def sizes(config: HFConfig) -> Sizes:
    check_attention(config, _ABSENT_WINDOW)
    divided = divided_head_dim(config)
    return dense_sizes(
        config,
        groups=config.integer("num_key_value_heads", 8),
        head_dim=config.integer("head_dim", divided, null=divided),
    )


def layer(sizes: Sizes, number: int) -> tuple[Rule, ...]:
    return blocks.layer_norms(sizes, sparse=False) + blocks.attention(sizes) + blocks.dense_mlp(sizes)


MISTRAL = Family("mistral", "MistralForCausalLM", sizes, layer)
