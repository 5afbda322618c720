"""The tokens of a rank's experts as rows: which token each row is, and what is computed row by row.

An expert's tokens are rows one after another, and so are experts, as a product over all of them wants it. What is here
in PyTorch, for the CPU, is what the kernels for GPUs are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine3d.models.experts.room import Room
from engine3d.platform.peer_memory import sum_in_order


@dataclass(frozen=True)
class Rows:
    """Where the tokens of experts are, M rows for N tokens.

    Args:
        ends: (E,) int32, the row after the last one of each expert.
        token: (M,) int32 of each row.
        place: (M,) int64 of each row's score among all scores; their number for rows of no token.
        score: (M,) float32 of each row.
        of_token: (N, K) int32, the rows of each token, in ascending order.
        per_token: (N,) int32, how many of these there are.
    """

    ends: Tensor
    token: Tensor
    place: Tensor
    score: Tensor
    of_token: Tensor
    per_token: Tensor


@dataclass(frozen=True)
class Apart:
    """Tokens of a tensor that are to be read elsewhere.

    Args:
        tokens: (T, H), contiguous.
        first: the number of the first of them in the tensor, which may have anything there.
    """

    tokens: Tensor
    first: int


def count_routed(routing: Tensor, sequences: Tensor, into: Tensor) -> None:
    """Add to (experts,) float64 the tokens of each expert, but for padding.

    Args:
        routing: (T, experts) bool.
        sequences: (T,) int32, the number of each token's sequence, -1 for padding.
    """
    if routing.is_cuda:
        from engine3d.models.experts.kernels import count

        count(routing.contiguous(), sequences.contiguous(), into)
        return
    into += (routing & (sequences >= 0)[:, None]).sum(dim=0)


def scores_of(probabilities: Tensor, routing: Tensor) -> Tensor:
    """(T, experts) float32 and bool -> (experts, T), -inf for experts that do not see the token."""
    if probabilities.is_cuda:
        from engine3d.models.experts.kernels import send

        return send(probabilities.contiguous(), routing.contiguous())
    return torch.where(routing, probabilities, -torch.inf).t().contiguous()


def rows_of(
    scores: Tensor, most: int, pieces: int = 1, room: Room | None = None, *, whole: bool = False
) -> Callable[[], list[Rows]]:
    """Give each token of each expert a row, of each piece for itself.

    What is after the last row, where there is room for more, is of no token.

    Args:
        scores: (R, E, T) float32 of the tokens of each of R ranks, -inf for experts that do not see the token.
        most: experts of any token, K.
        pieces: of the T tokens, as `Tensor.tensor_split` makes them. Token t of rank r of a piece of L tokens a rank is
            number r * L + t of it.
        room: of the layer, if room may be made for rows before their number is known. Where there is too little, rows
            are left out and `room.ahead.too_little` is set.
        whole: all experts are here. There is room for K rows of each token then, which is how many it has, and none to
            learn for others.

    Returns:
        What gives the rows, once their number is known, for which it waits on a GPU; or at once, with room.
    """
    ranks, experts, tokens = scores.shape
    most, even = min(most, experts), most / ranks
    lengths = [ranks * (tokens // pieces + (number < tokens % pieces)) for number in range(pieces)]
    rooms: list[int] | None = None
    if whole:
        room, rooms = None, [length * most for length in lengths]
    elif room is not None:
        rooms = room.of(lengths, most, even)
    too_little = None if room is None else room.ahead.too_little
    if not scores.is_cuda:
        starts = torch.arange(tokens).tensor_split(pieces)
        rows = [_rows_of_piece(scores, most, int(each[0]), len(each)) for each in starts]
        if room is not None:
            room.learn([len(each.token) for each in rows], lengths)
        if rooms is not None:
            rows = [_in_room(each, size, scores.numel(), too_little) for each, size in zip(rows, rooms, strict=True)]
        return lambda: rows
    from engine3d.models.experts.kernels import lay_out

    token, place, score, of_token, per_token, ends, of_pieces = lay_out(scores, most, pieces, rooms, too_little)

    def laid_out(sizes: Sequence[int]) -> list[Rows]:
        rows, seen = [], 0
        for number, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            its, of_piece = slice(seen * most, seen * most + size), slice(seen, seen + length)
            rows.append(Rows(ends[number], token[its], place[its], score[its], of_token[of_piece], per_token[of_piece]))
            seen += length
        return rows

    if rooms is not None and room is None:
        return partial(laid_out, rooms)
    told = of_pieces.to("cpu", non_blocking=True)  # page-locked
    is_told = torch.cuda.current_stream().record_event()

    def counted() -> list[Rows]:
        is_told.synchronize()
        counts = told.tolist()
        if room is not None:
            room.learn(counts, lengths)
        return laid_out(counts)

    if room is None or rooms is None:
        return counted
    room.learn_later(told, is_told, lengths)
    return partial(laid_out, rooms)


def _in_room(rows: Rows, size: int, nowhere: int, too_little: Tensor | None) -> Rows:
    """The rows of a piece in room for so many, the scores of those after the last one with a place that is none's."""
    count = len(rows.token)
    if count > size:
        assert too_little is not None
        too_little.fill_(1)
    kept, more = min(count, size), max(0, size - count)
    return Rows(
        rows.ends.clamp(max=size),
        F.pad(rows.token[:kept], (0, more)),
        F.pad(rows.place[:kept], (0, more), value=nowhere),
        F.pad(rows.score[:kept], (0, more)),
        rows.of_token.clamp(max=max(0, size - 1)),
        rows.per_token,
    )


def _rows_of_piece(scores: Tensor, most: int, first: int, tokens: int) -> Rows:
    """`rows_of` so many tokens of each rank, from `first` on."""
    ranks, experts, _ = scores.shape
    part = scores[:, :, first : first + tokens]
    seen = (part.transpose(0, 1) != -torch.inf).reshape(experts, -1)
    expert, token = seen.nonzero().unbind(1)
    rank, number = token // tokens, token % tokens
    place = (rank * experts + expert) * scores.shape[2] + first + number
    per_token = seen.sum(0, dtype=torch.int32)
    starts = per_token.cumsum(0) - per_token
    by_token = torch.argsort(token, stable=True)
    within = torch.arange(len(token)) - starts[token[by_token]]
    of_token = torch.zeros(ranks * tokens, most, dtype=torch.int32)
    of_token[token[by_token], within] = by_token.int()
    ends = seen.sum(1).cumsum(0, dtype=torch.int32)
    return Rows(ends, token.int(), place, scores.view(-1)[place], of_token, per_token)


def take_rows(tokens: Tensor, rows: Rows, apart: Apart | None = None) -> Tensor:
    """(N, H) -> (M, H): the token of each row, of those that are apart from there."""
    if tokens.is_cuda:
        from engine3d.models.experts.kernels import take

        return take(tokens, rows.token) if apart is None else take(tokens, rows.token, apart.tokens, apart.first)
    taken = tokens.index_select(0, rows.token)
    if apart is not None:
        number = rows.token - apart.first
        there = (number >= 0) & (number < len(apart.tokens))
        taken[there] = apart.tokens.index_select(0, number[there])
    return taken


def sum_rows(values: Tensor, rows: Rows) -> Tensor:
    """(M, H) -> (N, H) of the same dtype: the sum of each token's rows, in float32; 0 for a token without."""
    if values.is_cuda:
        from engine3d.models.experts.kernels import sum_of

        return sum_of(values, rows.of_token, rows.per_token)
    wide, count = torch.zeros(len(rows.per_token), values.shape[1], dtype=torch.float32), int(rows.ends[-1])
    return wide.index_add_(0, rows.token[:count], values[:count].float()).to(values.dtype)


def add_parts(received: Tensor, own: Tensor, rank: int, into: Tensor | None = None) -> Tensor:
    """The sum over R in float32, where `own` takes the place of what was received of `rank`.

    Args:
        received: (R, T, H).
        own: (T, H), contiguous.
        rank: of R.
        into: (T, H), contiguous, for the result.

    Returns:
        (T, H) of the same dtype.
    """
    result = torch.empty_like(own) if into is None else into
    if received.is_cuda:
        from engine3d.models.experts.kernels import add

        add(received, own, rank, result)
        return result
    return sum_in_order((own if number == rank else part for number, part in enumerate(received)), result)


def gated(values: Tensor, score: Tensor) -> Tensor:
    """SwiGLU times the row's score, in float32: silu(values[:, :I]) * values[:, I:] * score.

    Args:
        values: (M, 2 I).
        score: (M,) float32.

    Returns:
        (M, I) of the dtype of the values.
    """
    if values.is_cuda:
        from engine3d.models.experts.kernels import gate

        return gate(values, score)
    first, second = values.float().chunk(2, dim=1)
    return (F.silu(first) * second * score[:, None]).to(values.dtype)


def gated_gradient(values: Tensor, score: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `gated` gave, made again, and its gradients.

    Args:
        values, score: as of `gated`.
        gradient: (M, I) of its result.

    Returns:
        the result (M, I), the gradient of the values (M, 2 I), and that of the scores (M,) in float32.
    """
    if values.is_cuda:
        from engine3d.models.experts.kernels import gate_gradient

        return gate_gradient(values, score, gradient)
    first, second = values.float().chunk(2, dim=1)
    wide, weight = gradient.float(), score[:, None]
    sigmoid = first.sigmoid()
    silu = first * sigmoid
    slope = sigmoid * (1 + first * (1 - sigmoid))
    of_values = torch.cat([wide * weight * second * slope, wide * weight * silu], dim=1)
    of_score = (wide * silu * second).sum(1)
    return (silu * second * weight).to(values.dtype), of_values.to(values.dtype), of_score
