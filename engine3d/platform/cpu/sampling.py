"""Tokens drawn from the softmax of logits, and their log-probs, by PyTorch's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """See `Platform.draw_tokens`."""
    every = (logits.float() / temperatures[:, None]).log_softmax(dim=-1)
    probabilities = every.double().exp()
    cumulative = probabilities.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    # Where rounding leaves none beyond, the last that can be drawn.
    columns = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(probabilities > 0, columns, 0).amax(dim=-1, keepdim=True)
    tokens = torch.minimum(torch.searchsorted(cumulative, targets, right=True), last)
    return tokens[:, 0].int(), every.gather(1, tokens)[:, 0]
