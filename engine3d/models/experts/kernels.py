"""The kernels of `rows` and `grouped_products` for GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 4096
"""Tokens times experts that a program looks at."""
_TILES = 16
"""Of so many cells, that a program of `_count` adds up before it adds to what all do."""
_WIDTH = 2048
"""Columns that a program has at a time."""


def send(probabilities: Tensor, routing: Tensor) -> Tensor:
    """(T, experts) float32 and bool, both contiguous -> (experts, T) float32, -inf for experts not routed to."""
    tokens, experts = probabilities.shape
    result = probabilities.new_empty(experts, tokens)
    if tokens:
        width, block = _tile(experts)
        of_bytes = routing.view(torch.uint8)
        _send[(triton.cdiv(tokens, block),)](probabilities, of_bytes, result, experts, tokens, BLOCK=block, WIDTH=width)
    return result


def lay_out(
    scores: Tensor, most: int, pieces: int, rooms: Sequence[int] | None = None, too_little: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `rows_of` gives, for all pieces of the tokens one after another.

    Args:
        scores: (R, E, T) float32, contiguous.
        most: experts of any token, K.
        pieces: P of the T tokens of a rank, as `Tensor.tensor_split` makes them.
        rooms: for so many rows of each piece, the same for pieces of as many tokens; as many as there may be if None.
        too_little: () int32, set to 1 where a piece has more rows than that. They are left out.

    Returns:
        as `Rows` has them: token, place and score, with an element for each row that there may be, those of a piece
        beginning K times its first token; of_token (R * T, K) and per_token (R * T,), with those of the first piece
        before those of the second; ends (P, E). And (P,) int32: the rows of each piece.
    """
    ranks, experts, tokens = scores.shape
    count, device = ranks * tokens, scores.device
    # What is between the last row of a piece and the end of its room can be read.
    token = torch.zeros(count * most, dtype=torch.int32, device=device)
    place = torch.full((count * most,), scores.numel(), dtype=torch.int64, device=device)
    score = torch.zeros(count * most, dtype=torch.float32, device=device)
    of_token = torch.empty(count, most, dtype=torch.int32, device=device)
    per_token = torch.empty(count, dtype=torch.int32, device=device)
    ends = torch.empty(pieces, experts, dtype=torch.int32, device=device)
    of_pieces = torch.empty(pieces, dtype=torch.int32, device=device)
    if not count:
        return token, place, score, of_token, per_token, ends.zero_(), of_pieces.zero_()
    seen = torch.empty(experts * count, dtype=torch.int32, device=device)
    width, block = _tile(experts)
    grid = (triton.cdiv(tokens, block), ranks)
    least, longer = divmod(tokens, pieces)
    # The pieces of a token more are the first ones.
    of_longer, of_shorter = (rooms[0], rooms[-1]) if rooms is not None else (ranks * (least + 1) * most,) * 2
    _mark[grid](scores, seen, experts, tokens, least, longer, BLOCK=block, WIDTH=width)
    up_to = seen.cumsum(0, dtype=torch.int32)
    _lay_out[grid](
        scores,
        up_to,
        token,
        place,
        score,
        of_token,
        per_token,
        ends,
        of_pieces,
        of_pieces if too_little is None else too_little,
        experts,
        tokens,
        most,
        pieces,
        least,
        longer,
        of_longer,
        of_shorter,
        BLOCK=block,
        WIDTH=width,
    )
    return token, place, score, of_token, per_token, ends, of_pieces


def count(routing: Tensor, sequences: Tensor, into: Tensor) -> None:
    """Add to (experts,) float64 how many of the tokens whose sequence is no -1 are routed to each.

    Args:
        routing: (T, experts) bool, contiguous.
        sequences: (T,) int32, contiguous.
    """
    tokens, experts = routing.shape
    if tokens:
        width, block = _tile(experts)
        grid = (triton.cdiv(tokens, _TILES * block),)
        of_bytes = routing.view(torch.uint8)
        _count[grid](of_bytes, sequences, into, experts, tokens, BLOCK=block, WIDTH=width, TILES=_TILES)


def take(tokens: Tensor, token: Tensor, own: Tensor | None = None, first: int = 0) -> Tensor:
    """(N, H), contiguous, and (M,) int32 -> (M, H).

    Args:
        own: (T, H), contiguous, in place of those tokens from number `first` on.
    """
    rows, width = len(token), tokens.shape[1]
    result = tokens.new_empty(rows, width)
    if rows:
        count, grid = 0 if own is None else len(own), (rows, triton.cdiv(width, _WIDTH))
        _take[grid](tokens, tokens if own is None else own, token, result, first, count, width, WIDTH=_block(width))
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


def add_both(into: Tensor, one: Tensor, other: Tensor) -> None:
    """Two tensors like `into`, all contiguous, are added to it."""
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
    result, of_values, of_score = torch.empty_like(gradient), torch.empty_like(values), torch.empty_like(score)
    if rows:
        _gate_gradient[(rows,)](values, score, gradient, result, of_values, of_score, width, WIDTH=_block(width))
    return result, of_values, of_score


def _block(width: int) -> int:
    return min(_WIDTH, triton.next_power_of_2(width))


def _tile(experts: int) -> tuple[int, int]:
    """Of experts and of tokens: what a program looks at."""
    width = triton.next_power_of_2(experts)
    return width, max(1, _CELLS // width)


@triton.jit(do_not_specialize=["tokens"])
def _send(  # type: ignore[no-untyped-def]
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
def _count(  # type: ignore[no-untyped-def]
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
def _piece(number, least, longer):  # type: ignore[no-untyped-def]
    """The first token of the piece that token `number` is of, and the piece's tokens."""
    of_longer = longer * (least + 1)
    is_longer = number < of_longer
    start = tl.where(
        is_longer,
        number // (least + 1) * (least + 1),
        of_longer + (number - of_longer) // least * least,
    )
    return start, tl.where(is_longer, least + 1, least)


@triton.jit(do_not_specialize=["tokens", "least", "longer"])
def _mark(  # type: ignore[no-untyped-def]
    scores, seen, experts, tokens, least, longer, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """1 for each token of each expert, else 0: (pieces, E, R, tokens of the piece) one after another."""
    rank, ranks = tl.program_id(1), tl.num_programs(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)[:, None].to(tl.int64)
    inside = (number < tokens)[None, :] & (expert < experts)
    found = tl.load(scores + (rank * experts + expert) * tokens + number[None, :], mask=inside, other=-float("inf"))
    start, length = _piece(number, least, longer)
    first = (experts * ranks * start.to(tl.int64) + number - start)[None, :]
    to = first + (expert * ranks + rank) * length[None, :]
    tl.store(seen + to, (found != -float("inf")).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["tokens", "least", "longer", "of_longer", "of_shorter"])
def _lay_out(  # type: ignore[no-untyped-def]
    scores,
    up_to,
    token,
    place,
    score,
    of_token,
    per_token,
    ends,
    of_pieces,
    too_little,
    experts,
    tokens,
    most,
    pieces,
    least,
    longer,
    of_longer,
    of_shorter,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    rank, ranks = tl.program_id(1), tl.num_programs(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    inside = (number < tokens)[None, :] & (expert < experts)[:, None]
    here = (rank * experts + expert)[:, None].to(tl.int64) * tokens + number[None, :]
    found = tl.load(scores + here, mask=inside, other=-float("inf"))
    seen = found != -float("inf")
    start, length = _piece(number, least, longer)
    # Of what is before a piece, and of the token within the piece.
    before = experts * ranks * start.to(tl.int64)
    within = rank * length + number - start
    row_of_piece = tl.load(up_to + before - 1, mask=(number < tokens) & (start > 0), other=0)
    cell = (before + within)[None, :] + expert[:, None].to(tl.int64) * ranks * length[None, :]
    row = tl.load(up_to + cell, mask=seen, other=1) - 1 - row_of_piece[None, :]
    ordinal = tl.cumsum(seen.to(tl.int32), axis=0) - 1
    room = tl.where(length > least, of_longer, of_shorter)[None, :]
    to = (ranks * start).to(tl.int64)[None, :] * most + row
    has_room = seen & (row < room)
    tl.store(token + to, tl.broadcast_to(within[None, :], (WIDTH, BLOCK)), mask=has_room)
    tl.store(place + to, here, mask=has_room)
    tl.store(score + to, found, mask=has_room)
    index = (ranks * start + within).to(tl.int64)
    tl.store(of_token + index[None, :] * most + ordinal, tl.minimum(row, room - 1), mask=seen)
    tl.store(per_token + index, tl.sum(seen.to(tl.int32), axis=0), mask=number < tokens)
    if tl.program_id(0) + rank == 0:
        last = 0
        cells = tl.zeros((), dtype=tl.int64)
        for piece in range(0, pieces):
            of_expert = ranks * (least + (piece < longer).to(tl.int32))
            end = tl.load(up_to + cells + (expert + 1).to(tl.int64) * of_expert - 1, mask=expert < experts, other=0)
            most_rows = tl.where(piece < longer, of_longer, of_shorter)
            tl.store(ends + piece * experts + expert, tl.minimum(end - last, most_rows), mask=expert < experts)
            rows = tl.max(end, axis=0) - last
            last += rows
            tl.store(of_pieces + piece, rows)
            tl.store(too_little, 1, mask=rows > most_rows)
            cells += of_expert.to(tl.int64) * experts


@triton.jit(do_not_specialize=["first", "count"])
def _take(tokens, own, token, result, first, count, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    source = tl.load(token + row).to(tl.int64)
    here = (source >= first) & (source < first + count)
    value = tl.load(tokens + source * width + column, mask=inside & (here == 0), other=0.0)
    mine = tl.load(own + (source - first) * width + column, mask=inside & here, other=0.0)
    tl.store(result + row * width + column, tl.where(here, mine, value), mask=inside)


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
