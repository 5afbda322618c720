"""Triton kernels of `permutation` and `grouped_gemm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 4096
"""Tokens times experts of a program."""
_TILES = 16
"""Tiles of `_CELLS` that a program of `_count_tokens` adds up before its atomic addition."""
_WIDTH = 2048
"""Columns of a program at a time."""


def expert_scores(probabilities: Tensor, routing: Tensor) -> Tensor:
    """(T, experts) float32 and bool, both contiguous -> (experts, T) float32, -inf for experts not routed to."""
    tokens, experts = probabilities.shape
    result = probabilities.new_empty(experts, tokens)
    if tokens:
        width, block = _tile(experts)
        routing_bytes = routing.view(torch.uint8)
        _expert_scores[(triton.cdiv(tokens, block),)](
            probabilities, routing_bytes, result, experts, tokens, BLOCK=block, WIDTH=width
        )
    return result


def map_rows(
    scores: Tensor, topk: int, chunks: int, capacities: Sequence[int] | None = None, overflow: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the row maps of all chunks of the tokens, one after another; see `permutation.row_maps`.

    Args:
        scores: (R, E, T) float32, contiguous.
        topk: experts of any token, K.
        chunks: P of the T tokens of a rank, as `Tensor.tensor_split` makes them.
        capacities: rows of each chunk, the same for chunks of as many tokens; as many as there may be if None.
        overflow: () int32, set to 1 where a chunk has more rows than that. These are dropped.

    Returns:
        the tensors of `RowMap`. token, score_index and score have an element for each row that there may be, those of a
        chunk beginning at K times its first token. token_rows (R * T, K) and row_counts (R * T,) have those of the
        first chunk before those of the second. ends is (P, E). The last one, (P,) int32, has the rows of each chunk.
    """
    ranks, experts, tokens = scores.shape
    count, device = ranks * tokens, scores.device
    # Rows between the last one of a chunk and the end of its capacity can be read.
    token = torch.zeros(count * topk, dtype=torch.int32, device=device)
    score_index = torch.full((count * topk,), scores.numel(), dtype=torch.int64, device=device)
    score = torch.zeros(count * topk, dtype=torch.float32, device=device)
    token_rows = torch.empty(count, topk, dtype=torch.int32, device=device)
    row_counts = torch.empty(count, dtype=torch.int32, device=device)
    ends = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    counts = torch.empty(chunks, dtype=torch.int32, device=device)
    if not count:
        return token, score_index, score, token_rows, row_counts, ends.zero_(), counts.zero_()
    seen = torch.empty(experts * count, dtype=torch.int32, device=device)
    width, block = _tile(experts)
    grid = (triton.cdiv(tokens, block), ranks)
    least, longer = divmod(tokens, chunks)
    # The first chunks are those with a token more.
    longer_capacity, shorter_capacity = (
        (capacities[0], capacities[-1]) if capacities is not None else (ranks * (least + 1) * topk,) * 2
    )
    _mark[grid](scores, seen, experts, tokens, least, longer, BLOCK=block, WIDTH=width)
    up_to = seen.cumsum(0, dtype=torch.int32)
    _map_rows[grid](
        scores,
        up_to,
        token,
        score_index,
        score,
        token_rows,
        row_counts,
        ends,
        counts,
        counts if overflow is None else overflow,
        experts,
        tokens,
        topk,
        chunks,
        least,
        longer,
        longer_capacity,
        shorter_capacity,
        BLOCK=block,
        WIDTH=width,
    )
    return token, score_index, score, token_rows, row_counts, ends, counts


def count_tokens(routing: Tensor, sequences: Tensor, into: Tensor) -> None:
    """Add to (experts,) float64 the tokens routed to each, without those of sequence -1.

    Args:
        routing: (T, experts) bool, contiguous.
        sequences: (T,) int32, contiguous.
    """
    tokens, experts = routing.shape
    if tokens:
        width, block = _tile(experts)
        grid = (triton.cdiv(tokens, _TILES * block),)
        routing_bytes = routing.view(torch.uint8)
        _count_tokens[grid](routing_bytes, sequences, into, experts, tokens, BLOCK=block, WIDTH=width, TILES=_TILES)


def permute(tokens: Tensor, token: Tensor, local: Tensor | None = None, first: int = 0) -> Tensor:
    """(N, H), contiguous, and (M,) int32 -> (M, H).

    Args:
        local: (T, H), contiguous, in place of those tokens from number `first` on.
    """
    rows, width = len(token), tokens.shape[1]
    result = tokens.new_empty(rows, width)
    if rows:
        count, grid = 0 if local is None else len(local), (rows, triton.cdiv(width, _WIDTH))
        _permute[grid](
            tokens, tokens if local is None else local, token, result, first, count, width, WIDTH=_block(width)
        )
    return result


def unpermute(values: Tensor, token_rows: Tensor, row_counts: Tensor) -> Tensor:
    """(M, H), contiguous, (N, K) int32 and (N,) int32 -> (N, H)."""
    (tokens, topk), width = token_rows.shape, values.shape[1]
    result = values.new_empty(tokens, width)
    if tokens:
        grid = (tokens, triton.cdiv(width, _WIDTH))
        _unpermute[grid](values, token_rows, row_counts, result, width, topk, WIDTH=_block(width))
    return result


def sum_partials(received: Tensor, local: Tensor, rank: int, result: Tensor) -> None:
    """Sum (R, T, H), with (T, H) as that of `rank`, into (T, H), all contiguous."""
    if count := local.numel():
        _sum_partials[(triton.cdiv(count, _WIDTH),)](received, local, result, count, rank, len(received), WIDTH=_WIDTH)


def add_both(into: Tensor, one: Tensor, other: Tensor) -> None:
    """Add two tensors like `into` to it, all contiguous."""
    if count := into.numel():
        _add_both[(triton.cdiv(count, _WIDTH),)](into, one, other, count, WIDTH=_WIDTH)


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
    result, values_gradient, score_gradient = (
        torch.empty_like(gradient),
        torch.empty_like(values),
        torch.empty_like(score),
    )
    if rows:
        _gate_gradient[(rows,)](
            values, score, gradient, result, values_gradient, score_gradient, width, WIDTH=_block(width)
        )
    return result, values_gradient, score_gradient


def _block(width: int) -> int:
    return min(_WIDTH, triton.next_power_of_2(width))


def _tile(experts: int) -> tuple[int, int]:
    """Experts and tokens of a program."""
    width = triton.next_power_of_2(experts)
    return width, max(1, _CELLS // width)


@triton.jit(do_not_specialize=["tokens"])
def _expert_scores(  # type: ignore[no-untyped-def]
    probabilities, routing, result, experts, tokens, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :].to(tl.int64)
    expert = tl.arange(0, WIDTH)[:, None]
    inside = (token < tokens) & (expert < experts)
    here = token * experts + expert
    chosen = tl.load(routing + here, mask=inside, other=0) != 0
    value = tl.load(probabilities + here, mask=inside, other=0.0)
    tl.store(result + expert.to(tl.int64) * tokens + token, tl.where(chosen, value, -float("inf")), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _count_tokens(  # type: ignore[no-untyped-def]
    routing, sequences, into, experts, tokens, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr
):
    expert = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.int32)
    for tile in range(0, TILES):
        token = (tl.program_id(0) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        real = tl.load(sequences + token, mask=token < tokens, other=-1) >= 0
        here = token[None, :].to(tl.int64) * experts + expert[:, None]
        chosen = tl.load(routing + here, mask=real[None, :] & (expert < experts)[:, None], other=0) != 0
        total += tl.sum(chosen.to(tl.int32), axis=1)
    tl.atomic_add(into + expert, total.to(tl.float64), mask=expert < experts)


@triton.jit
def _chunk(number, least, longer):  # type: ignore[no-untyped-def]
    """The first token of the chunk that token `number` is of, and the chunk's tokens."""
    boundary = longer * (least + 1)
    is_longer = number < boundary
    start = tl.where(
        is_longer,
        number // (least + 1) * (least + 1),
        boundary + (number - boundary) // least * least,
    )
    return start, tl.where(is_longer, least + 1, least)


@triton.jit(do_not_specialize=["tokens", "least", "longer"])
def _mark(  # type: ignore[no-untyped-def]
    scores, seen, experts, tokens, least, longer, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """1 for each token of each expert, else 0: (chunks, E, R, tokens of the chunk) one after another."""
    rank, ranks = tl.program_id(1), tl.num_programs(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)[:, None].to(tl.int64)
    inside = (number < tokens)[None, :] & (expert < experts)
    value = tl.load(scores + (rank * experts + expert) * tokens + number[None, :], mask=inside, other=-float("inf"))
    start, length = _chunk(number, least, longer)
    first = (experts * ranks * start.to(tl.int64) + number - start)[None, :]
    to = first + (expert * ranks + rank) * length[None, :]
    tl.store(seen + to, (value != -float("inf")).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["tokens", "least", "longer", "longer_capacity", "shorter_capacity"])
def _map_rows(  # type: ignore[no-untyped-def]
    scores,
    up_to,
    token,
    score_index,
    score,
    token_rows,
    row_counts,
    ends,
    counts,
    overflow,
    experts,
    tokens,
    topk,
    chunks,
    least,
    longer,
    longer_capacity,
    shorter_capacity,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    rank, ranks = tl.program_id(1), tl.num_programs(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    inside = (number < tokens)[None, :] & (expert < experts)[:, None]
    here = (rank * experts + expert)[:, None].to(tl.int64) * tokens + number[None, :]
    value = tl.load(scores + here, mask=inside, other=-float("inf"))
    seen = value != -float("inf")
    start, length = _chunk(number, least, longer)
    # Offsets of the chunk, and of the token within the chunk.
    before = experts * ranks * start.to(tl.int64)
    within = rank * length + number - start
    rows_before = tl.load(up_to + before - 1, mask=(number < tokens) & (start > 0), other=0)
    cell = (before + within)[None, :] + expert[:, None].to(tl.int64) * ranks * length[None, :]
    row = tl.load(up_to + cell, mask=seen, other=1) - 1 - rows_before[None, :]
    ordinal = tl.cumsum(seen.to(tl.int32), axis=0) - 1
    capacity = tl.where(length > least, longer_capacity, shorter_capacity)[None, :]
    to = (ranks * start).to(tl.int64)[None, :] * topk + row
    fits = seen & (row < capacity)
    tl.store(token + to, tl.broadcast_to(within[None, :], (WIDTH, BLOCK)), mask=fits)
    tl.store(score_index + to, here, mask=fits)
    tl.store(score + to, value, mask=fits)
    index = (ranks * start + within).to(tl.int64)
    tl.store(token_rows + index[None, :] * topk + ordinal, tl.minimum(row, capacity - 1), mask=seen)
    tl.store(row_counts + index, tl.sum(seen.to(tl.int32), axis=0), mask=number < tokens)
    if tl.program_id(0) + rank == 0:
        last = 0
        cells = tl.zeros((), dtype=tl.int64)
        for chunk in range(0, chunks):
            of_expert = ranks * (least + (chunk < longer).to(tl.int32))
            end = tl.load(up_to + cells + (expert + 1).to(tl.int64) * of_expert - 1, mask=expert < experts, other=0)
            most_rows = tl.where(chunk < longer, longer_capacity, shorter_capacity)
            tl.store(ends + chunk * experts + expert, tl.minimum(end - last, most_rows), mask=expert < experts)
            rows = tl.max(end, axis=0) - last
            last += rows
            tl.store(counts + chunk, rows)
            tl.store(overflow, 1, mask=rows > most_rows)
            cells += of_expert.to(tl.int64) * experts


@triton.jit(do_not_specialize=["first", "count"])
def _permute(tokens, local, token, result, first, count, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    source = tl.load(token + row).to(tl.int64)
    here = (source >= first) & (source < first + count)
    value = tl.load(tokens + source * width + column, mask=inside & (here == 0), other=0.0)
    local_value = tl.load(local + (source - first) * width + column, mask=inside & here, other=0.0)
    tl.store(result + row * width + column, tl.where(here, local_value, value), mask=inside)


@triton.jit
def _unpermute(values, token_rows, row_counts, result, width, topk, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for number in range(0, tl.load(row_counts + token)):
        row = tl.load(token_rows + token * topk + number).to(tl.int64)
        total += tl.load(values + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _sum_partials(received, local, result, count, rank, ranks, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < count
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    position = element
    for number in range(0, ranks):
        if number == rank:
            term = tl.load(local + element, mask=inside, other=0.0)
        else:
            term = tl.load(received + position, mask=inside, other=0.0)
        total += term.to(tl.float32)
        position += count
    tl.store(result + element, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _add_both(into, one, other, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < count
    total = tl.load(into + element, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(one + element, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(other + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + element, total.to(into.dtype.element_ty), mask=inside)


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
    values, score, gradient, result, values_gradient, score_gradient, width, WIDTH: tl.constexpr
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
        first_gradient = slope * second * sigmoid * (1 + first * (1 - sigmoid))
        tl.store(values_gradient + left, first_gradient.to(kind), mask=inside)
        tl.store(values_gradient + right, (slope * silu).to(kind), mask=inside)
    tl.store(score_gradient + row, total)
