"""Routes of tokens as transformers computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def reference_routes(model: Path | torch.nn.Module, tokens: Sequence[int]) -> Tensor:
    """(T, layers with experts, top-k) experts of each token, by number."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
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
