"""Tokens drawn from the softmax of logits, and their log-probs, by one kernel that reads the logits once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Logits that a program has in flight."""
_WARPS = 8


@triton.jit
def draw_rows(  # type: ignore[no-untyped-def]
    logits,
    stride,
    temperatures,
    uniforms,
    block_sums,
    tokens,
    logprobs,
    vocabulary,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw one token for each row of logits, by inversion: the first whose cumulative probability is beyond `uniforms`.

    `block_sums`, [rows, 2, blocks], keeps the sums of a row's exponentials block by block, so that one block alone has
    to be read again. Sums over blocks are in float64. A row's result does not depend on the other rows. With another
    stride or alignment of rows its log-prob can differ by rounding.
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row).to(tl.float32)
    count = tl.cdiv(vocabulary, BLOCK)
    maxima = block_sums + row.to(tl.int64) * 2 * count
    sums = maxima + count
    lane = tl.arange(0, BLOCK)
    for block in range(0, count):
        column = block * BLOCK + lane
        scaled = tl.load(start + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        highest = tl.max(scaled, axis=0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(maxima + block, highest)
        tl.store(sums + block, tl.sum(tl.exp(scaled - base), axis=0))
    tl.debug_barrier()  # of the program: all of its threads read what some have written

    index = tl.arange(0, BLOCKS)
    of_block = tl.load(maxima + index, mask=index < count, other=float("-inf"))
    highest = tl.max(of_block, axis=0)
    mass = (tl.load(sums + index, mask=index < count, other=0.0) * tl.exp(of_block - highest)).to(tl.float64)
    beyond = tl.cumsum(mass, axis=0)
    total = tl.max(beyond, axis=0)
    # A nan, +inf, or -inf alone: no distribution, as in PyTorch. A maximum passes over a nan, and a sum does not.
    sums_up = tl.sum(mass, axis=0)
    sound = sums_up == sums_up
    target = tl.load(uniforms + row) * total
    # Where rounding leaves none beyond, the last that can be drawn.
    block = tl.min(tl.where((beyond > target) & (mass > 0), index, BLOCKS), axis=0)
    block = tl.minimum(block, tl.max(tl.where(mass > 0, index, 0), axis=0))
    reached = tl.sum(tl.where(index == block, beyond - mass, 0.0), axis=0)

    column = block * BLOCK + lane
    scaled = tl.load(start + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) / temperature
    weight = tl.exp(scaled - highest)
    rest = (target - reached).to(tl.float32)
    position = tl.min(tl.where((tl.cumsum(weight, axis=0) > rest) & (weight > 0), lane, BLOCK), axis=0)
    position = tl.minimum(position, tl.max(tl.where(weight > 0, lane, 0), axis=0))
    drawn = tl.sum(tl.where(lane == position, scaled, 0.0), axis=0)
    tl.store(tokens + row, tl.where(sound, block * BLOCK + position, 0))
    tl.store(logprobs + row, tl.where(sound, drawn - highest - tl.log(total).to(tl.float32), float("nan")))


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """See `Platform.draw_tokens`."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocabulary, _BLOCK)
    block_sums = torch.empty(rows, 2, blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        draw_rows[(rows,)](
            logits,
            logits.stride(0),
            temperatures.contiguous(),
            uniforms,
            block_sums,
            tokens,
            logprobs,
            vocabulary,
            BLOCK=_BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=_WARPS,
        )
    return tokens, logprobs
