"""All that a layer's experts do with a micro-batch, in one step of autograd.

Every rank of an expert-parallel group sees the tokens of all of them. With as many experts a token as ranks or more,
that is less to send than each token once for each of its experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine3d.models.experts.grouped_products import learn, learned, product
from engine3d.models.experts.room import Room
from engine3d.models.experts.rows import Rows, gated, gated_gradient, rows_of, scores_of, sum_rows, take_rows
from engine3d.models.experts.ways import Coming, Way


@dataclass(frozen=True)
class Weights:
    """A linear layer of a rank's experts.

    Args:
        values: (E, out, in).
        gradients: (E, out, in) of any floating dtype, to which the backward pass adds; None for weights that are not
            trained.
        parameter: any of the layer's, which says whether gradients are wanted though the tokens may need none.
    """

    values: Tensor
    gradients: Tensor | None
    parameter: Tensor


def routed_experts(
    hidden: Tensor,
    probabilities: Tensor,
    routing: Tensor,
    first: Weights,
    last: Weights,
    *,
    most: int,
    way: Way,
    gathered: Sequence[Coming] | None = None,
    room: Room | None = None,
) -> Tensor:
    """What the experts make of each token: the sum over its experts of probability * expert(token).

    An expert is W2 (silu(g) * u) with (g, u) = W1 x. For the backward pass a layer keeps its input and (g, u); what
    else that needs is made again: the tokens are gathered once more, and the activation is computed once more.

    Products are in the dtype of the weights; what is between them and the sum over a rank's experts are in float32.
    The sums of the ranks are added up as the way does it.

    Args:
        hidden: (T, H) of this rank; the ranks of a group have as many each.
        probabilities: (T, experts) float32.
        routing: (T, experts) bool, whether the expert sees the token.
        first: W1, with the rows of g before those of u.
        last: W2.
        most: experts of any token.
        way: between the ranks of the expert-parallel group.
        gathered: the tokens, if `way` is gathering them already: what its `gather_ahead` gave.
        room: of the layer, if the host is not to wait for the number of rows; see `rows_of`. One rank never waits.

    Returns:
        (T, H) of the dtype of `hidden`.
    """
    result: Tensor = _RoutedExperts.apply(  # type: ignore[no-untyped-call]
        hidden, probabilities, routing, first, last, first.parameter, last.parameter, most, way, gathered, room
    )
    return result


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        probabilities: Tensor,
        routing: Tensor,
        first: Weights,
        last: Weights,
        _first: Tensor,
        _last: Tensor,
        most: int,
        way: Way,
        gathered: Sequence[Coming] | None,
        room: Room | None,
    ) -> Tensor:
        hidden = hidden.contiguous()
        tokens = way.pieces(hidden)
        scores = way.to_experts(scores_of(probabilities, routing))
        if gathered is None:  # after the scores, so that rows are laid out beside it
            gathered = [way.gather(piece) for piece in tokens]
        # Of all, before there is work to wait for.
        counted = rows_of(scores.value(), most, len(tokens), room, whole=way.ranks == 1)
        there = gathered[0].value()  # queued before the host waits
        rows = counted()
        betweens, sums = [], _Sums(way, hidden, len(tokens))
        for number, (its_tokens, its_rows) in enumerate(zip(gathered, rows, strict=True)):
            given = take_rows(its_tokens.value() if number else there, its_rows, its_tokens.apart)
            its_tokens.done()
            between = product(given, first.values.transpose(1, 2), its_rows.ends)
            del given
            made = product(gated(between, its_rows.score), last.values.transpose(1, 2), its_rows.ends)
            sums.add(sum_rows(made, its_rows))
            betweens.append(between)
            del made
        ctx.save_for_backward(hidden, *betweens, *(each for its_rows in rows for each in vars(its_rows).values()))
        ctx.first, ctx.last, ctx.way = first, last, way
        return sums.value()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, last, way = ctx.first, ctx.last, ctx.way
        hidden, *saved = ctx.saved_tensors
        tokens = way.pieces(hidden)
        betweens, of_rows = saved[: len(tokens)], itertools.batched(saved[len(tokens) :], len(fields(Rows)))
        gathered = [way.gather(piece) for piece in way.pieces(gradient.contiguous())]
        # And one of rows of no token.
        of_scores = hidden.new_zeros(way.ranks * len(first.values) * len(hidden) + 1, dtype=torch.float32)
        of_routed, sums = None, _Sums(way, hidden, len(tokens))
        of_first, of_last = (_Learning(weights.gradients, len(tokens)) for weights in (first, last))
        for number, (its_gradient, between, of_its_rows) in enumerate(zip(gathered, betweens, of_rows, strict=True)):
            its_rows = Rows(*of_its_rows)
            its_tokens = way.gather(tokens[number]) if first.gradients is not None else None
            of_made = take_rows(its_gradient.value(), its_rows, its_gradient.apart)
            its_gradient.done()
            activated, of_between, of_score = gated_gradient(
                between, its_rows.score, product(of_made, last.values, its_rows.ends)
            )
            of_scores.scatter_(0, its_rows.place, of_score)
            if number == len(tokens) - 1:
                of_routed = way.from_experts(of_scores[:-1].view(way.ranks, len(first.values), -1))
            of_last.add(of_made, activated, its_rows.ends)
            del of_made, activated
            sums.add(sum_rows(product(of_between, first.values, its_rows.ends), its_rows))
            if its_tokens is not None:  # beside the sum over ranks
                given = take_rows(its_tokens.value(), its_rows, its_tokens.apart)
                its_tokens.done()
                of_first.add(of_between, given, its_rows.ends)
                del given
            del of_between
        assert of_routed is not None
        of_probabilities = of_routed.value().flatten(0, 1).t().contiguous()
        return sums.value(), of_probabilities, *itertools.repeat(None, 9)


class _Learning:
    """Gradients of weights. What pieces of the tokens have is as large, and is added to them two pieces at a time."""

    def __init__(self, gradients: Tensor | None, pieces: int) -> None:
        self._gradients, self._left = gradients, pieces
        self._waiting: Tensor | None = None

    def add(self, gradient: Tensor, rows: Tensor, ends: Tensor) -> None:
        """What the next piece has."""
        if self._gradients is None:
            return
        self._left -= 1
        found, waiting, self._waiting = learned(gradient, rows, ends), self._waiting, None
        if waiting is not None or not self._left:
            learn(self._gradients, waiting, found)
        else:
            self._waiting = found


class _Sums:
    """Sums over ranks of pieces of the tokens, one after another, as one tensor like `hidden`."""

    def __init__(self, way: Way, hidden: Tensor, pieces: int) -> None:
        self._way = way
        self._whole = torch.empty_like(hidden) if pieces > 1 else None
        self._places = [None] if self._whole is None else way.pieces(self._whole)
        self._coming: list[Coming] = []

    def add(self, parts: Tensor) -> None:
        """What this rank has of the next piece."""
        self._coming.append(self._way.add_up(parts, self._places[len(self._coming)]))

    def value(self) -> Tensor:
        made = [each.value() for each in self._coming]
        return made[0] if self._whole is None else self._whole
