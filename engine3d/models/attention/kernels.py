"""The kernels of `normed_rotary` for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 2
_ELEMENTS = 256
"""Elements of first halves of heads in a tile: 8 bytes of bf16 a thread. With 16 the backward pass takes 168 registers
a thread in place of 96, and a multiprocessor runs six programs."""
_PROGRAMS = 1056
"""Most programs of the backward pass: eight for each multiprocessor of a Hopper GPU. Gradients of weights depend on it.
"""


def forward(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, angles: Tensor, positions: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `normed_rotary.heads_of`. All tensors contiguous, head_dim a power of two above 1."""
    tokens, groups, heads, head_dim = _sizes(mixed, query_weight)
    query = mixed.new_empty(tokens, groups * heads, head_dim)
    # Each in memory of its own: Transformer Engine recognises the layout by it.
    key, value = (mixed.new_empty(tokens, groups, head_dim) for _ in range(2))
    if tokens:
        _normed_rotary_forward[(tokens,)](
            mixed,
            query_weight,
            key_weight,
            angles,
            positions,
            query,
            key,
            value,
            eps,
            **_constants(groups, heads, head_dim),
        )
    return query, key, value


def backward(
    mixed: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    angles: Tensor,
    positions: Tensor,
    eps: float,
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    *,
    weights: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `normed_rotary.gradients_of`. Sums over tokens are in the same order in every run.

    Args:
        mixed, query_weight, key_weight, angles, positions, eps: as of `forward`.
        of_query, of_key, of_value: contiguous, of the shape and dtype of the results of `forward`.
        weights: True to compute the weights' gradients; otherwise they are zeros.
    """
    tokens, groups, heads, head_dim = _sizes(mixed, query_weight)
    programs = min(tokens, _PROGRAMS)
    of_mixed = torch.empty_like(mixed)
    sums = torch.empty(programs if weights else 0, 2, head_dim, dtype=torch.float32, device=mixed.device)
    if tokens:
        _normed_rotary_backward[(programs,)](
            mixed,
            query_weight,
            key_weight,
            angles,
            positions,
            of_query,
            of_key,
            of_value,
            of_mixed,
            sums,
            tokens,
            eps,
            WEIGHTS=weights,
            **_constants(groups, heads, head_dim),
        )
    return of_mixed, sums.sum(0)


def _sizes(mixed: Tensor, query_weight: Tensor) -> tuple[int, int, int, int]:
    """Tokens, groups, query heads of a group, head_dim."""
    (tokens, groups, width), head_dim = mixed.shape, len(query_weight)
    return tokens, groups, width // head_dim - 2, head_dim


def _constants(groups: int, heads: int, head_dim: int) -> dict[str, int]:
    """Constants of both kernels: sizes, and the query heads, and keys or values, of a token in a tile."""
    half = head_dim // 2
    most = max(1, _ELEMENTS // half)
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "HALF": half,
        "QUERIES": min(most, triton.next_power_of_2(groups * heads)),
        "KEYS": min(most, triton.next_power_of_2(groups)),
        "num_warps": _WARPS,
    }


@triton.jit
def _normed_rotary_forward(  # type: ignore[no-untyped-def]
    mixed,
    query_weight,
    key_weight,
    angles,
    positions,
    query,
    key,
    value,
    eps,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    mixed += token * (GROUPS * (HEADS + 2) * 2 * HALF)
    query += token * (GROUPS * HEADS * 2 * HALF)
    key += token * (GROUPS * 2 * HALF)
    value += token * (GROUPS * 2 * HALF)
    cos, sin = _turn(angles, positions, token, HALF)
    column = tl.arange(0, HALF)[None, :]
    first_weight, second_weight = _weight(query_weight, HALF)
    for start in tl.static_range(0, GROUPS * HEADS, QUERIES):
        head = start + tl.arange(0, QUERIES)[:, None]
        source = mixed + (head + head // HEADS * 2) * (2 * HALF) + column
        inside = head < GROUPS * HEADS
        first, second = _normed_and_rotated(source, inside, first_weight, second_weight, cos, sin, eps, HALF)
        target = query + head * (2 * HALF) + column
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    first_weight, second_weight = _weight(key_weight, HALF)
    full = tl.arange(0, 2 * HALF)[None, :]
    for start in tl.static_range(0, GROUPS, KEYS):
        group = start + tl.arange(0, KEYS)[:, None]
        source = mixed + (group * (HEADS + 2) + HEADS) * (2 * HALF)
        inside = group < GROUPS
        first, second = _normed_and_rotated(source + column, inside, first_weight, second_weight, cos, sin, eps, HALF)
        target = key + group * (2 * HALF) + column
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
        copied = tl.load(source + 2 * HALF + full, mask=inside)
        tl.store(value + group * (2 * HALF) + full, copied, mask=inside)


@triton.jit
def _normed_rotary_backward(  # type: ignore[no-untyped-def]
    mixed,
    query_weight,
    key_weight,
    angles,
    positions,
    of_query,
    of_key,
    of_value,
    of_mixed,
    sums,
    tokens,
    eps,
    WEIGHTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column, full = tl.arange(0, HALF)[None, :], tl.arange(0, 2 * HALF)[None, :]
    # A thread sums over all its tokens. Threads are summed once, at the end.
    sum_query_first = tl.zeros((QUERIES, HALF), dtype=tl.float32)
    sum_query_second = tl.zeros((QUERIES, HALF), dtype=tl.float32)
    sum_key_first = tl.zeros((KEYS, HALF), dtype=tl.float32)
    sum_key_second = tl.zeros((KEYS, HALF), dtype=tl.float32)
    for step in range(0, tl.cdiv(tokens - program, programs)):
        token = program.to(tl.int64) + step * programs
        offset = token * (GROUPS * (HEADS + 2) * 2 * HALF)
        cos, sin = _turn(angles, positions, token, HALF)
        first_weight, second_weight = _weight(query_weight, HALF)
        for start in tl.static_range(0, GROUPS * HEADS, QUERIES):
            head = start + tl.arange(0, QUERIES)[:, None]
            inside = head < GROUPS * HEADS
            source = of_query + token * (GROUPS * HEADS * 2 * HALF) + head * (2 * HALF) + column
            at = offset + (head + head // HEADS * 2) * (2 * HALF) + column
            term_first, term_second = _gradient(
                source, mixed + at, of_mixed + at, inside, first_weight, second_weight, cos, sin, eps, HALF
            )
            if WEIGHTS:
                sum_query_first += term_first
                sum_query_second += term_second
        first_weight, second_weight = _weight(key_weight, HALF)
        for start in tl.static_range(0, GROUPS, KEYS):
            group = start + tl.arange(0, KEYS)[:, None]
            inside = group < GROUPS
            source = token * (GROUPS * 2 * HALF) + group * (2 * HALF)
            at = offset + (group * (HEADS + 2) + HEADS) * (2 * HALF)
            term_first, term_second = _gradient(
                of_key + source + column,
                mixed + at + column,
                of_mixed + at + column,
                inside,
                first_weight,
                second_weight,
                cos,
                sin,
                eps,
                HALF,
            )
            if WEIGHTS:
                sum_key_first += term_first
                sum_key_second += term_second
            copied = tl.load(of_value + source + full, mask=inside)
            tl.store(of_mixed + at + 2 * HALF + full, copied, mask=inside)
    if WEIGHTS:
        target = sums + program * (4 * HALF) + tl.arange(0, HALF)
        tl.store(target, tl.sum(sum_query_first, axis=0))
        tl.store(target + HALF, tl.sum(sum_query_second, axis=0))
        tl.store(target + 2 * HALF, tl.sum(sum_key_first, axis=0))
        tl.store(target + 3 * HALF, tl.sum(sum_key_second, axis=0))


@triton.jit
def _turn(angles, positions, token, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine of a token's angles, (1, HALF)."""
    position = tl.load(positions + token).to(tl.int64)
    angle = tl.load(angles + position * (2 * HALF) + tl.arange(0, HALF))
    return tl.cos(angle)[None, :], tl.sin(angle)[None, :]


@triton.jit
def _weight(weight, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of a norm's weight, (1, HALF) float32."""
    source = weight + tl.arange(0, HALF)[None, :]
    return tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)


@triton.jit
def _normed_and_rotated(  # type: ignore[no-untyped-def]
    source, inside, first_weight, second_weight, cos, sin, eps, HALF: tl.constexpr
):
    """Both halves of the heads whose first halves are at `source`."""
    kind = source.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(first, second, eps, HALF)
    first = (first * scale * first_weight).to(kind).to(tl.float32)
    second = (second * scale * second_weight).to(kind).to(tl.float32)
    return (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    of_turned, source, target, inside, first_weight, second_weight, cos, sin, eps, HALF: tl.constexpr
):
    """Write the gradient of the heads at `source`; return both halves of what they add to that of their weight."""
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    first_slope = tl.load(of_turned, mask=inside, other=0.0).to(tl.float32)
    second_slope = tl.load(of_turned + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(first, second, eps, HALF)
    first, second = first * scale, second * scale
    first_back = first_slope * cos + second_slope * sin
    second_back = second_slope * cos - first_slope * sin
    first_part, second_part = first_back * first, second_back * second
    first_back, second_back = first_back * first_weight, second_back * second_weight
    mean = tl.sum(first_back * first + second_back * second, axis=1, keep_dims=True) / (2 * HALF)
    kind = target.dtype.element_ty
    tl.store(target, (scale * (first_back - first * mean)).to(kind), mask=inside)
    tl.store(target + HALF, (scale * (second_back - second * mean)).to(kind), mask=inside)
    return first_part, second_part


@triton.jit
def _scale(first, second, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows, 1): 1 / root mean square."""
    return tl.rsqrt(tl.sum(first * first + second * second, axis=1, keep_dims=True) / (2 * HALF) + eps)
