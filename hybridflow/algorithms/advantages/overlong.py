"""Length penalty of long responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_rows

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(lengths: Tensor, *, limit: int | Tensor, buffer: int, factor: float) -> Tensor:
    """Compute the soft overlong punishment of DAPO, which is added to the reward of a response of L tokens.

         0                                 L <= limit - buffer
        -factor * (L - (limit - buffer)) / buffer    up to limit
        -factor                            L > limit

    Source: arXiv:2503.14476, eq. 13, where limit is L_max, buffer L_cache, and the factor 1.

    `lengths` (B,) int64, tokens of each response, the end-of-sequence token included; `limit` of all, or (B,) int64.
    Returns (B,) float32, computed in float64. Raises ValueError for lengths or limits of another shape, and for a
    buffer that is not within 1 and the limit.
    """
    check_rows("overlong_penalty", rows=len(lengths), lengths=lengths)
    if isinstance(limit, torch.Tensor):
        check_rows("overlong_penalty", rows=len(lengths), limit=limit)
    least = min(limit.tolist(), default=buffer) if isinstance(limit, torch.Tensor) else limit
    if not 1 <= buffer <= least:
        raise ValueError(f"overlong_penalty: a buffer of {buffer} tokens before a limit of {least}, expected 1 to that")
    over = (lengths - (limit - buffer)).to(torch.float64) / buffer
    return (-factor * over.clamp(0, 1)).to(torch.float32) + 0.0
