"""A training engine's settings as arguments of Megatron-Core's TransformerConfig."""

from __future__ import annotations

from typing import Any

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.sizes import Sizes
from engine3d.platform import platform
from engine3d.training.config import TrainConfig


def megatron_settings(config: TrainConfig, spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """What a model's TransformerConfig has beside what `models.megatron_config` gives it.

    Raises:
        UserError: recompute=selective without Transformer Engine.
    """
    settings: dict[str, Any] = {
        "sequence_parallel": config.sequence_parallel and layout.tp > 1,
        # Packed micro-batches differ in length, and so do the activations that go between stages.
        "variable_seq_lengths": layout.pp > 1,
        # Gradients are sums over micro-batches and ranks; see LossFunction.
        "calculate_per_token_loss": True,
        "deterministic_mode": config.deterministic,
    }
    if config.recompute == "full":
        some = config.recompute_layers
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if some is not None:
            method = {"recompute_method": "block", "recompute_num_layers": some}
        settings |= {"recompute_granularity": "full", **method}
    elif config.recompute == "selective":
        if not platform.has_transformer_engine:
            raise UserError("recompute=selective needs Transformer Engine, which is absent here: use none or full")
        settings |= {"recompute_granularity": "selective", "recompute_modules": _cheap_modules(spec.sizes)}
    return settings | config.megatron


def _cheap_modules(sizes: Sizes) -> list[str]:
    """What takes memory to keep and hardly any time to compute again. Flash attention keeps next to nothing."""
    modules = ["layernorm"]
    if sizes.experts:
        modules.append("moe_act")
    if sizes.latent is not None:
        modules.append("mla_up_proj")
    return modules
