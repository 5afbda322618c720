"""The kernels of `rows` for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 4096
"""Tokens times experts that a program of `_lay_out` looks at."""
_WIDTH = 2048
"""Columns that a program has at a time."""


def lay_out(scores: Tensor, up_to: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All of `Rows` but their ends; of what has an element for each row, as many as there may be rows.

    Args:
        scores: (R, E, T) float32, contiguous.
        up_to: (E, R * T) int32, contiguous: rows up to and with this token of this expert.
        most: experts of any token.
    """
    ranks, experts, tokens = scores.shape
    count, device = ranks * tokens, scores.device
    token = torch.empty(count * most, dtype=torch.int32, device=device)
    place = torch.empty(count * most, dtype=torch.int64, device=device)
    score = torch.empty(count * most, dtype=torch.float32, device=device)
    of_token = torch.empty(count, most, dtype=torch.int32, device=device)
    per_token = torch.empty(count, dtype=torch.int32, device=device)
    width = triton.next_power_of_2(experts)
    block = max(1, _CELLS // width)
    if count:
        grid = (triton.cdiv(tokens, block), ranks)
        _lay_out[grid](
            scores,
            up_to,
            token,
            place,
            score,
            of_token,
            per_token,
            experts,
            tokens,
            count,
            most,
            BLOCK=block,
            WIDTH=width,
        )
    return token, place, score, of_token, per_token


def take(tokens: Tensor, token: Tensor) -> Tensor:
    """(N, H), contiguous, and (M,) int32 -> (M, H)."""
    rows, width = len(token), tokens.shape[1]
    result = tokens.new_empty(rows, width)
    if rows:
        _take[(rows, triton.cdiv(width, _WIDTH))](tokens, token, result, width, WIDTH=_block(width))
    return result


def sum_of(values: Tensor, of_token: Tensor, per_token: Tensor) -> Tensor:
    """(M, H), contiguous, (N, K) int32 and (N,) int32 -> (N, H)."""
    (tokens, most), width = of_token.shape, values.shape[1]
    result = values.new_empty(tokens, width)
    if tokens:
        grid = (tokens, triton.cdiv(width, _WIDTH))
        _sum[grid](values, of_token, per_token, result, width, most, WIDTH=_block(width))
    return result


def add(received: Tensor, own: Tensor, rank: int, result: Tensor) -> None:
    """(R, T, H) and (T, H) into (T, H), all contiguous."""
    if count := own.numel():
        _add[(triton.cdiv(count, _WIDTH),)](received, own, result, count, rank, len(received), WIDTH=_WIDTH)


def gate(values: Tensor, score: Tensor) -> Tensor:
    """(M, 2 I), contiguous, and (M,) float32 -> (M, I)."""
    rows, width = values.shape[0], values.shape[1] // 2
    result = values.new_empty(rows, width)
    if rows:
        _gate[(rows,)](values, score, result, width, WIDTH=_block(width))
    return result


def gate_gradient(values: Tensor, score: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(M, 2 I), (M,) float32 and (M, I), all contiguous -> (M, I), (M, 2 I) and (M,) float32."""
    rows, width = gradient.shape
    result, of_values, of_score = torch.empty_like(gradient), torch.empty_like(values), torch.empty_like(score)
    if rows:
        _gate_gradient[(rows,)](values, score, gradient, result, of_values, of_score, width, WIDTH=_block(width))
    return result, of_values, of_score


def _block(width: int) -> int:
    return min(_WIDTH, triton.next_power_of_2(width))


@triton.jit
def _lay_out(  # type: ignore[no-untyped-def]
    scores,
    up_to,
    token,
    place,
    score,
    of_token,
    per_token,
    experts,
    tokens,
    count,
    most,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    rank = tl.program_id(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    inside = (number < tokens)[None, :] & (expert < experts)[:, None]
    here = (rank * experts + expert)[:, None].to(tl.int64) * tokens + number[None, :]
    found = tl.load(scores + here, mask=inside, other=-float("inf"))
    seen = found != -float("inf")
    index = rank * tokens + number
    row = tl.load(up_to + expert[:, None].to(tl.int64) * count + index[None, :], mask=seen, other=1) - 1
    ordinal = tl.cumsum(seen.to(tl.int32), axis=0) - 1
    tl.store(token + row, tl.broadcast_to(index[None, :], (WIDTH, BLOCK)), mask=seen)
    tl.store(place + row, here, mask=seen)
    tl.store(score + row, found, mask=seen)
    tl.store(of_token + index[None, :] * most + ordinal, row, mask=seen)
    tl.store(per_token + index, tl.sum(seen.to(tl.int32), axis=0), mask=number < tokens)


@triton.jit
def _take(tokens, token, result, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    source = tl.load(token + row).to(tl.int64)
    tl.store(result + row * width + column, tl.load(tokens + source * width + column, mask=inside), mask=inside)


@triton.jit
def _sum(values, of_token, per_token, result, width, most, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for number in range(0, tl.load(per_token + token)):
        row = tl.load(of_token + token * most + number).to(tl.int64)
        total += tl.load(values + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _add(received, own, result, count, rank, ranks, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < count
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    place = element
    for number in range(0, ranks):
        if number == rank:
            part = tl.load(own + element, mask=inside, other=0.0)
        else:
            part = tl.load(received + place, mask=inside, other=0.0)
        total += part.to(tl.float32)
        place += count
    tl.store(result + element, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gate(values, score, result, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(score + row)
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < width
        first = tl.load(values + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(values + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
        gated = first * tl.sigmoid(first) * second * weight
        tl.store(result + row * width + column, gated.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradient(  # type: ignore[no-untyped-def]
    values, score, gradient, result, of_values, of_score, width, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(score + row)
    total = 0.0
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < width
        left, right = row * 2 * width + column, (row * 2 + 1) * width + column
        first = tl.load(values + left, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(values + right, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(first)
        silu = first * sigmoid
        total += tl.sum(slope * silu * second, axis=0)
        slope *= weight
        kind = result.dtype.element_ty
        tl.store(result + row * width + column, (silu * second * weight).to(kind), mask=inside)
        of_first = slope * second * sigmoid * (1 + first * (1 - sigmoid))
        tl.store(of_values + left, of_first.to(kind), mask=inside)
        tl.store(of_values + right, (slope * silu).to(kind), mask=inside)
    tl.store(of_score + row, total)
