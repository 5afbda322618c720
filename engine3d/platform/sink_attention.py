"""Attention with sinks: a learned score of each query head that takes part in the softmax and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor, scale: float | None
) -> Tensor:
    """Attend to the keys that each query sees. Scores are summed up in float32.

    Args:
        query: [..., heads, queries, head_dim].
        key: [..., groups, keys, head_dim]; `value` likewise.
        value: of the keys.
        sinks: (heads,) scores.
        seen: (queries, keys) bool.
        scale: of the other scores; None for 1 / sqrt(head_dim).

    Returns:
        As the query.
    """
    grouped = query.unflatten(-3, (key.shape[-3], -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (grouped @ key.unsqueeze(-3).mT).float().masked_fill(~seen, -torch.inf)
    of_sinks = sinks.float().view(key.shape[-3], -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, of_sinks), dim=-1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype) @ value.unsqueeze(-3)).flatten(-4, -3)


def seen_keys(queries: Tensor, keys: int, window: int | None) -> Tensor:
    """(queries, keys) bool: keys at or before each query, and within its window.

    Args:
        queries: positions of the queries; keys have the positions from 0 on.
        keys: number of them.
        window: keys that a query sees at most, that of its own position included.
    """
    positions, rows = torch.arange(keys, device=queries.device), queries[:, None]
    seen = positions <= rows
    return seen if window is None else seen & (positions > rows - window)
