"""SGLang's models of the tiny configs, built in the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine3d.models import model_spec
from engine3d.reshard.describe.shards import Holding
from engine3d.reshard.describe.trace import Tensors
from tests.support.tiny_families import CONFIGS

# What SGLang 0.5.16 does not know: dense layers in a Qwen3-MoE, and biases in a Llama's MLP.
_NOT_IN_SGLANG: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "llama": {"mlp_bias": False},
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: config | _NOT_IN_SGLANG.get(config["model_type"], {}) for name, config in CONFIGS.items()},
    "llama-tied": {**CONFIGS["llama"], "tie_word_embeddings": True},
}
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]
"""tp and ep: experts whole, cut, one group of them a rank, and two ranks a group."""


def has_experts(name: str) -> bool:
    return bool(model_spec(MODELS[name]).sizes.experts)


def may_cut_experts(name: str) -> bool:
    """True if SGLang cuts the model's experts over ep groups."""
    return has_experts(name) and not model_spec(MODELS[name]).sizes.expert_biases


ALL_LAYOUTS = ("qwen3_moe",)
"""Models that are checked on all of them, before any release too. Others have the most cuts that they allow."""
TWO_RANKS = ("qwen3_moe-biases", "mixtral", "deepseek_v3-queries")
"""Models whose experts SGLang loads as it loads another's."""


def _is_checked_always(name: str, tp: int, ep: int) -> bool:
    if name in ALL_LAYOUTS or (name, tp) in (("llama", 1), ("deepseek_v3", 1)):
        return True
    return (tp, ep) == ((2, 1) if not may_cut_experts(name) else (2, 2) if name in TWO_RANKS else (4, 2))


CASES = [
    pytest.param(name, tp, ep, marks=() if _is_checked_always(name, tp, ep) else pytest.mark.release)
    for name in MODELS
    for tp, ep in LAYOUTS
    if ep == 1 or may_cut_experts(name)
]


def hf_tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensors:
    """Shape and dtype of every tensor of a model."""
    return {name: (tensor.shape, dtype) for name, tensor in model_spec(config).rules.hf_tensors.items()}


def random_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in tensors.items()}


def write_holdings(
    buffers: Sequence[torch.Tensor], holdings: Sequence[Holding], values: dict[str, torch.Tensor]
) -> None:
    """Put the tensors' values where the holdings say, element by element."""
    for holding in holdings:
        value = values[holding.tensor][tuple(slice(*edges) for edges in holding.box)]
        buffer = buffers[holding.buffer]
        buffer.view(-1).as_strided(value.shape, holding.strides, holding.offset).copy_(value)
