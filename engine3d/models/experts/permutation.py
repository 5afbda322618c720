"""Permutation of tokens into the rows of a rank's experts, and what is computed row by row.

An expert's tokens are adjacent rows, and experts follow one another, as a grouped GEMM needs it. The code in PyTorch
here is for the CPU, and is what the kernels for GPUs are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine3d.models.experts.row_capacity import RowCapacity
from engine3d.platform.peer_memory import sum_in_order


@dataclass(frozen=True)
class RowMap:
    """Map between N tokens and the M rows of experts.

    Args:
        ends: (E,) int32, the row after the last one of each expert.
        token: (M,) int32, the token of each row.
        score_index: (M,) int64, the index of each row's score among all scores; their number for rows of no token.
        score: (M,) float32 of each row.
        token_rows: (N, K) int32, the rows of each token, in ascending order.
        row_counts: (N,) int32, the number of these rows.
    """

    ends: Tensor
    token: Tensor
    score_index: Tensor
    score: Tensor
    token_rows: Tensor
    row_counts: Tensor


@dataclass(frozen=True)
class LocalTokens:
    """Tokens of a gathered tensor that are read from this rank's own tensor instead.

    Args:
        tokens: (T, H), contiguous.
        first: the index of the first of them in the gathered tensor, which may have anything there.
    """

    tokens: Tensor
    first: int


def count_tokens(routing: Tensor, sequences: Tensor, into: Tensor) -> None:
    """Add to (experts,) float64 the tokens of each expert, without padding.

    Args:
        routing: (T, experts) bool.
        sequences: (T,) int32, the number of each token's sequence, -1 for padding.
    """
    if routing.is_cuda:
        from engine3d.models.experts import kernels

        kernels.count_tokens(routing.contiguous(), sequences.contiguous(), into)
        return
    into += (routing & (sequences >= 0)[:, None]).sum(dim=0)


def expert_scores(probabilities: Tensor, routing: Tensor) -> Tensor:
    """(T, experts) float32 and bool -> (experts, T), -inf for experts that do not see the token."""
    if probabilities.is_cuda:
        from engine3d.models.experts import kernels

        return kernels.expert_scores(probabilities.contiguous(), routing.contiguous())
    return torch.where(routing, probabilities, -torch.inf).t().contiguous()


def row_maps(
    scores: Tensor, topk: int, chunks: int = 1, capacity: RowCapacity | None = None, *, complete: bool = False
) -> Callable[[], list[RowMap]]:
    """Assign a row to each token of each expert, in each chunk separately.

    Rows after the last one, where the capacity is larger, are of no token.

    Args:
        scores: (R, E, T) float32 of the tokens of each of R ranks, -inf for experts that do not see the token.
        topk: most experts of any token, K.
        chunks: of the T tokens, as `Tensor.tensor_split` makes them. Token t of rank r of a chunk of L tokens a rank is
            number r * L + t of it.
        capacity: of the layer, if it may be predicted before the number of rows is known. Rows beyond it are dropped,
            and `capacity.predicted.overflow` is set.
        complete: this rank has all experts. Each token has K rows then, so that nothing is predicted.

    Returns:
        a function that returns the maps. On a GPU it waits for the number of rows, unless there is a capacity.
    """
    ranks, experts, tokens = scores.shape
    topk, even = min(topk, experts), topk / ranks
    lengths = [ranks * (tokens // chunks + (number < tokens % chunks)) for number in range(chunks)]
    capacities: list[int] | None = None
    if complete:
        capacity, capacities = None, [length * topk for length in lengths]
    elif capacity is not None:
        capacities = capacity.of(lengths, topk, even)
    overflow = None if capacity is None else capacity.predicted.overflow
    if not scores.is_cuda:
        indices = torch.arange(tokens).tensor_split(chunks)
        maps = [_map_chunk(scores, topk, int(chunk[0]), len(chunk)) for chunk in indices]
        if capacity is not None:
            capacity.observe([len(rows.token) for rows in maps], lengths)
        if capacities is not None:
            sizes = zip(maps, capacities, strict=True)
            maps = [_resize(rows, size, scores.numel(), overflow) for rows, size in sizes]
        return lambda: maps
    from engine3d.models.experts import kernels

    token, score_index, score, token_rows, row_counts, ends, counts = kernels.map_rows(
        scores, topk, chunks, capacities, overflow
    )

    def slices(sizes: Sequence[int]) -> list[RowMap]:
        maps, start = [], 0
        for number, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            rows, chunk = slice(start * topk, start * topk + size), slice(start, start + length)
            maps.append(
                RowMap(ends[number], token[rows], score_index[rows], score[rows], token_rows[chunk], row_counts[chunk])
            )
            start += length
        return maps

    if capacities is not None and capacity is None:
        return partial(slices, capacities)
    host_counts = counts.to("cpu", non_blocking=True)  # page-locked
    is_copied = torch.cuda.current_stream().record_event()

    def wait_for_counts() -> list[RowMap]:
        is_copied.synchronize()
        sizes = host_counts.tolist()
        if capacity is not None:
            capacity.observe(sizes, lengths)
        return slices(sizes)

    if capacity is None or capacities is None:
        return wait_for_counts
    capacity.observe_later(host_counts, is_copied, lengths)
    return partial(slices, capacities)


def _resize(rows: RowMap, size: int, no_score: int, overflow: Tensor | None) -> RowMap:
    """The rows of a chunk, cut or padded to `size`; `no_score` is the score index of padding."""
    count = len(rows.token)
    if count > size:
        assert overflow is not None
        overflow.fill_(1)
    kept, padding = min(count, size), max(0, size - count)
    return RowMap(
        rows.ends.clamp(max=size),
        F.pad(rows.token[:kept], (0, padding)),
        F.pad(rows.score_index[:kept], (0, padding), value=no_score),
        F.pad(rows.score[:kept], (0, padding)),
        rows.token_rows.clamp(max=max(0, size - 1)),
        rows.row_counts,
    )


def _map_chunk(scores: Tensor, topk: int, first: int, tokens: int) -> RowMap:
    """The row map of the chunk of each rank's tokens from `first` on."""
    ranks, experts, _ = scores.shape
    chunk = scores[:, :, first : first + tokens]
    seen = (chunk.transpose(0, 1) != -torch.inf).reshape(experts, -1)
    expert, token = seen.nonzero().unbind(1)
    rank, number = token // tokens, token % tokens
    score_index = (rank * experts + expert) * scores.shape[2] + first + number
    row_counts = seen.sum(0, dtype=torch.int32)
    starts = row_counts.cumsum(0) - row_counts
    by_token = torch.argsort(token, stable=True)
    within = torch.arange(len(token)) - starts[token[by_token]]
    token_rows = torch.zeros(ranks * tokens, topk, dtype=torch.int32)
    token_rows[token[by_token], within] = by_token.int()
    ends = seen.sum(1).cumsum(0, dtype=torch.int32)
    return RowMap(ends, token.int(), score_index, scores.view(-1)[score_index], token_rows, row_counts)


def permute(tokens: Tensor, rows: RowMap, local: LocalTokens | None = None) -> Tensor:
    """(N, H) -> (M, H): the token of each row, read from `local` where it has it."""
    if tokens.is_cuda:
        from engine3d.models.experts import kernels

        if local is None:
            return kernels.permute(tokens, rows.token)
        return kernels.permute(tokens, rows.token, local.tokens, local.first)
    permuted = tokens.index_select(0, rows.token)
    if local is not None:
        number = rows.token - local.first
        is_local = (number >= 0) & (number < len(local.tokens))
        permuted[is_local] = local.tokens.index_select(0, number[is_local])
    return permuted


def unpermute(values: Tensor, rows: RowMap) -> Tensor:
    """(M, H) -> (N, H) of the same dtype: the sum of each token's rows, in float32; 0 for a token without."""
    if values.is_cuda:
        from engine3d.models.experts import kernels

        return kernels.unpermute(values, rows.token_rows, rows.row_counts)
    wide, count = torch.zeros(len(rows.row_counts), values.shape[1], dtype=torch.float32), int(rows.ends[-1])
    return wide.index_add_(0, rows.token[:count], values[:count].float()).to(values.dtype)


def sum_partials(received: Tensor, local: Tensor, rank: int, into: Tensor | None = None) -> Tensor:
    """The sum over R in float32, where `local` replaces what was received of `rank`.

    Args:
        received: (R, T, H).
        local: (T, H), contiguous.
        rank: of R.
        into: (T, H), contiguous, for the result.

    Returns:
        (T, H) of the same dtype.
    """
    result = torch.empty_like(local) if into is None else into
    if received.is_cuda:
        from engine3d.models.experts import kernels

        kernels.sum_partials(received, local, rank, result)
        return result
    return sum_in_order((local if number == rank else tensor for number, tensor in enumerate(received)), result)


def gated(values: Tensor, score: Tensor) -> Tensor:
    """SwiGLU times the row's score, in float32: silu(values[:, :I]) * values[:, I:] * score.

    Args:
        values: (M, 2 I).
        score: (M,) float32.

    Returns:
        (M, I) of the dtype of the values.
    """
    if values.is_cuda:
        from engine3d.models.experts import kernels

        return kernels.gate(values, score)
    first, second = values.float().chunk(2, dim=1)
    return (F.silu(first) * second * score[:, None]).to(values.dtype)


def gated_gradient(values: Tensor, score: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gated` again, and its gradients.

    Args:
        values, score: as of `gated`.
        gradient: (M, I) of its result.

    Returns:
        the result (M, I), the gradient of the values (M, 2 I), and that of the scores (M,) in float32.
    """
    if values.is_cuda:
        from engine3d.models.experts import kernels

        return kernels.gate_gradient(values, score, gradient)
    first, second = values.float().chunk(2, dim=1)
    wide, weight = gradient.float(), score[:, None]
    sigmoid = first.sigmoid()
    silu = first * sigmoid
    slope = sigmoid * (1 + first * (1 - sigmoid))
    values_gradient = torch.cat([wide * weight * second * slope, wide * weight * silu], dim=1)
    score_gradient = (wide * silu * second).sum(1)
    return (silu * second * weight).to(values.dtype), values_gradient.to(values.dtype), score_gradient
