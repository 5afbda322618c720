"""The sum of what a rank's own experts made of each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 2048
"""Columns of a program."""


def sum_local(rows: Tensor, experts: Tensor, into: Tensor, scale: float) -> None:
    """Into (T, H) the sum of (T, K, H) rows, in float32 and rounded once; rows of other ranks' experts are not read.

    Args:
        rows: contiguous.
        experts: (T, K) of each row, contiguous; -1 for those of other ranks.
        into: contiguous.
        scale: of the sum.
    """
    tokens, most, width = rows.shape
    if tokens:
        grid = (tokens, triton.cdiv(width, _WIDTH))
        columns = min(_WIDTH, triton.next_power_of_2(width))
        _sum_local_experts[grid](rows, experts, into, width, scale, MOST=most, WIDTH=columns)


@triton.jit(do_not_specialize=["scale"])
def _sum_local_experts(  # type: ignore[no-untyped-def]
    rows, experts, into, width, scale, MOST: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for number in tl.static_range(MOST):
        row = token * MOST + number
        read = (column < width) & (tl.load(experts + row) >= 0)
        total += tl.load(rows + row * width + column, mask=read, other=0.0).to(tl.float32)
    tl.store(into + token * width + column, (total * scale).to(into.dtype.element_ty), mask=column < width)
