"""All that a layer's experts do with a micro-batch, in one step of autograd.

Every rank of an expert-parallel group sees the tokens of all of them. With as many experts a token as ranks or more,
that is less to send than each token once for each of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine3d.models.experts.grouped_products import learn, product
from engine3d.models.experts.rows import Rows, gated, gated_gradient, rows_of, sum_rows, take_rows


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
    group: dist.ProcessGroup,
) -> Tensor:
    """What the experts make of each token: the sum over its experts of probability * expert(token).

    An expert is W2 (silu(g) * u) with (g, u) = W1 x. For the backward pass a layer keeps its input and (g, u); what
    else that needs is made again: the tokens are gathered once more, and the activation is computed once more.

    Products are in the dtype of the weights; what is between them and the sum over a rank's experts are in float32.
    The sums of the ranks are added up in the dtype of the weights.

    Args:
        hidden: (T, H) of this rank; the ranks of a group have as many each.
        probabilities: (T, experts) float32.
        routing: (T, experts) bool, whether the expert sees the token.
        first: W1, with the rows of g before those of u.
        last: W2.
        most: experts of any token.
        group: the expert-parallel one; its ranks have the experts one after another.

    Returns:
        (T, H) of the dtype of `hidden`.
    """
    result: Tensor = _RoutedExperts.apply(  # type: ignore[no-untyped-call]
        hidden, probabilities, routing, first, last, first.parameter, last.parameter, most, group
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
        group: dist.ProcessGroup,
    ) -> Tensor:
        way = _Way(group)
        hidden = hidden.contiguous()
        scores = way.to_experts(_scores(probabilities, routing))
        gathered = way.gather(hidden)
        rows = rows_of(scores.value(), most)
        given = take_rows(gathered.value(), rows)
        between = product(given, first.values.transpose(1, 2), rows.ends)
        del given, gathered
        made = product(gated(between, rows.score), last.values.transpose(1, 2), rows.ends)
        parts = sum_rows(made, rows)
        ctx.save_for_backward(hidden, between, *vars(rows).values())
        ctx.first, ctx.last, ctx.way = first, last, way
        return way.add_up(parts).value()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, between, *of_rows = ctx.saved_tensors
        rows, first, last, way = Rows(*of_rows), ctx.first, ctx.last, ctx.way
        gathered_gradient = way.gather(gradient.contiguous())
        gathered = way.gather(hidden) if first.gradients is not None else None
        of_made = take_rows(gathered_gradient.value(), rows)
        del gathered_gradient
        activated, of_between, of_score = gated_gradient(between, rows.score, product(of_made, last.values, rows.ends))
        of_scores = of_score.new_zeros(way.ranks * len(hidden) * len(first.values))
        of_scores.scatter_(0, rows.place, of_score)
        of_probabilities = way.from_experts(of_scores.view(way.ranks, len(first.values), len(hidden)))
        if last.gradients is not None:
            learn(last.gradients, of_made, activated, rows.ends)
        del of_made, activated
        of_hidden = way.add_up(sum_rows(product(of_between, first.values, rows.ends), rows))
        if gathered is not None:  # beside the sum over ranks
            learn(first.gradients, of_between, take_rows(gathered.value(), rows), rows.ends)
        of_routed = of_probabilities.value().view(-1, len(hidden)).t().contiguous()
        return of_hidden.value(), of_routed, None, None, None, None, None, None, None


def _scores(probabilities: Tensor, routing: Tensor) -> Tensor:
    """(T, experts) twice -> (experts, T), with -inf for experts that do not see the token."""
    result = probabilities.new_empty(probabilities.shape[::-1])
    nothing = probabilities.new_full((), -torch.inf)
    return torch.where(routing.t(), probabilities.t(), nothing, out=result)


@dataclass
class _Coming:
    """A tensor that the ranks are sending each other."""

    tensor: Tensor
    work: dist.Work | None = None

    def value(self) -> Tensor:
        """The tensor, for what is queued from now on."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor


class _Way:
    """Between the ranks that share the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = group.size()

    def to_experts(self, scores: Tensor) -> _Coming:
        """(experts, T) of this rank's tokens -> (R, E, T) of this rank's experts."""
        return self._exchange(scores.view(self.ranks, -1, scores.shape[1]))

    def from_experts(self, scores: Tensor) -> _Coming:
        """The other way."""
        return self._exchange(scores)

    def gather(self, tokens: Tensor) -> _Coming:
        """(T, H) of each rank -> (R * T, H)."""
        if self.ranks == 1:
            return _Coming(tokens)
        result = tokens.new_empty(self.ranks * len(tokens), *tokens.shape[1:])
        return _Coming(result, dist.all_gather_into_tensor(result, tokens, self._group, async_op=True))

    def add_up(self, parts: Tensor) -> _Coming:
        """(R * T, H) of each rank -> (T, H), the sum over ranks of this rank's tokens."""
        if self.ranks == 1:
            return _Coming(parts)
        result = parts.new_empty(len(parts) // self.ranks, *parts.shape[1:])
        return _Coming(result, dist.reduce_scatter_tensor(result, parts, group=self._group, async_op=True))

    def _exchange(self, tensor: Tensor) -> _Coming:
        if self.ranks == 1:
            return _Coming(tensor)
        result = torch.empty_like(tensor)
        return _Coming(result, dist.all_to_all_single(result, tensor, group=self._group, async_op=True))
