"""Routes of tokens as transformers computes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


@lru_cache(4)
def reference_model(directory: Path) -> PreTrainedModel:
    """The model of a directory, whose weights do not change, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def reference_routes(model: Path | torch.nn.Module, tokens: Sequence[int]) -> Tensor:
    """(T, layers with experts, top-k) experts of each token, by number."""
    if isinstance(model, Path):
        model = reference_model(model)
    routes: list[Tensor] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        routes.append(arguments[1])

    hooks = [
        module.register_forward_pre_hook(note)
        for name, module in model.named_modules()
        if name.endswith(".mlp.experts")
    ]
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(routes, dim=1).sort(-1).values


def by_layer(routes: Any, layers: int) -> Tensor:
    """An engine's (rows, columns) as (rows, layers, top-k) experts, by number."""
    return torch.from_numpy(routes.copy()).long().unflatten(1, (layers, -1)).sort(-1).values
