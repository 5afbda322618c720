"""The computation of a layer's experts for a micro-batch, fused into one autograd function.

Every rank of an expert-parallel group sees the tokens of all of them. With as many experts a token as ranks or more,
that sends less than each token once for each of its experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine3d.models.experts.grouped_gemm import accumulate, grouped_gemm, weight_gradient
from engine3d.models.experts.permutation import (
    RowMap,
    expert_scores,
    gated,
    gated_gradient,
    permute,
    row_maps,
    unpermute,
)
from engine3d.models.experts.row_capacity import RowCapacity
from engine3d.models.experts.token_dispatcher import PendingTensor, TokenDispatcher


@dataclass(frozen=True)
class Weights:
    """A linear layer of a rank's experts.

    Args:
        values: (E, out, in).
        gradients: (E, out, in) of any floating dtype, to which the backward pass adds; None for weights that are not
            trained.
        parameter: any of the layer's, which says whether gradients are needed though the tokens may need none.
    """

    values: Tensor
    gradients: Tensor | None
    parameter: Tensor


def fused_experts(
    hidden: Tensor,
    probabilities: Tensor,
    routing: Tensor,
    fc1: Weights,
    fc2: Weights,
    *,
    topk: int,
    dispatcher: TokenDispatcher,
    gathered: Sequence[PendingTensor] | None = None,
    capacity: RowCapacity | None = None,
) -> Tensor:
    """The output of the experts for each token: the sum over its experts of probability * expert(token).

    An expert is W2 (silu(g) * u) with (g, u) = W1 x. A layer saves its input and (g, u) for the backward pass, which
    gathers the tokens and computes the activation again.

    GEMMs are in the dtype of the weights. What is between them and the sum over a rank's experts are in float32. The
    dispatcher adds up the sums of the ranks.

    Args:
        hidden: (T, H) of this rank; the ranks of a group have as many each.
        probabilities: (T, experts) float32.
        routing: (T, experts) bool, True where the expert sees the token.
        fc1: W1, with the rows of g before those of u.
        fc2: W2.
        topk: most experts of any token.
        dispatcher: of the expert-parallel group.
        gathered: the result of `dispatcher.gather_ahead`, if it is gathering the tokens already.
        capacity: of the layer, if the host is not to wait for the number of rows; see `row_maps`. One rank never waits.

    Returns:
        (T, H) of the dtype of `hidden`.
    """
    result: Tensor = _FusedExperts.apply(  # type: ignore[no-untyped-call]
        hidden, probabilities, routing, fc1, fc2, fc1.parameter, fc2.parameter, topk, dispatcher, gathered, capacity
    )
    return result


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        probabilities: Tensor,
        routing: Tensor,
        fc1: Weights,
        fc2: Weights,
        _fc1: Tensor,
        _fc2: Tensor,
        topk: int,
        dispatcher: TokenDispatcher,
        gathered: Sequence[PendingTensor] | None,
        capacity: RowCapacity | None,
    ) -> Tensor:
        hidden = hidden.contiguous()
        chunks = dispatcher.chunks(hidden)
        scores = dispatcher.to_experts(expert_scores(probabilities, routing))
        if gathered is None:  # after the scores, so that rows are mapped meanwhile
            gathered = [dispatcher.gather(chunk) for chunk in chunks]
        # All chunks, before there is work to wait for.
        pending_rows = row_maps(scores.value(), topk, len(chunks), capacity, complete=dispatcher.ranks == 1)
        first_tokens = gathered[0].value()  # queued before the host waits
        maps = pending_rows()
        preactivations, sums = [], _Sums(dispatcher, hidden, len(chunks))
        for number, (pending, rows) in enumerate(zip(gathered, maps, strict=True)):
            permuted = permute(pending.value() if number else first_tokens, rows, pending.local)
            pending.done()
            preactivation = grouped_gemm(permuted, fc1.values.transpose(1, 2), rows.ends)
            del permuted
            output = grouped_gemm(gated(preactivation, rows.score), fc2.values.transpose(1, 2), rows.ends)
            sums.add(unpermute(output, rows))
            preactivations.append(preactivation)
            del output
        ctx.save_for_backward(hidden, *preactivations, *(tensor for rows in maps for tensor in vars(rows).values()))
        ctx.fc1, ctx.fc2, ctx.dispatcher = fc1, fc2, dispatcher
        return sums.value()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        fc1, fc2, dispatcher = ctx.fc1, ctx.fc2, ctx.dispatcher
        hidden, *saved = ctx.saved_tensors
        chunks = dispatcher.chunks(hidden)
        preactivations, maps = saved[: len(chunks)], itertools.batched(saved[len(chunks) :], len(fields(RowMap)))
        gathered = [dispatcher.gather(chunk) for chunk in dispatcher.chunks(gradient.contiguous())]
        # The last one is of rows without a token.
        score_gradients = hidden.new_zeros(dispatcher.ranks * len(fc1.values) * len(hidden) + 1, dtype=torch.float32)
        returned_scores, sums = None, _Sums(dispatcher, hidden, len(chunks))
        fc1_gradients, fc2_gradients = (_WeightGradients(weights.gradients, len(chunks)) for weights in (fc1, fc2))
        for number, (pending, preactivation, tensors) in enumerate(zip(gathered, preactivations, maps, strict=True)):
            rows = RowMap(*tensors)
            tokens = dispatcher.gather(chunks[number]) if fc1.gradients is not None else None
            output_gradient = permute(pending.value(), rows, pending.local)
            pending.done()
            activated, preactivation_gradient, score_gradient = gated_gradient(
                preactivation, rows.score, grouped_gemm(output_gradient, fc2.values, rows.ends)
            )
            score_gradients.scatter_(0, rows.score_index, score_gradient)
            if number == len(chunks) - 1:
                returned_scores = dispatcher.from_experts(
                    score_gradients[:-1].view(dispatcher.ranks, len(fc1.values), -1)
                )
            fc2_gradients.add(output_gradient, activated, rows.ends)
            del output_gradient, activated
            sums.add(unpermute(grouped_gemm(preactivation_gradient, fc1.values, rows.ends), rows))
            if tokens is not None:  # overlaps with the sum over ranks
                permuted = permute(tokens.value(), rows, tokens.local)
                tokens.done()
                fc1_gradients.add(preactivation_gradient, permuted, rows.ends)
                del permuted
            del preactivation_gradient
        assert returned_scores is not None
        probability_gradients = returned_scores.value().flatten(0, 1).t().contiguous()
        return sums.value(), probability_gradients, *itertools.repeat(None, 9)


class _WeightGradients:
    """Gradients of weights. Those of a chunk are as large, and are added two chunks at a time."""

    def __init__(self, gradients: Tensor | None, chunks: int) -> None:
        self._gradients, self._remaining = gradients, chunks
        self._pending: Tensor | None = None

    def add(self, gradient: Tensor, rows: Tensor, ends: Tensor) -> None:
        """Add those of the next chunk."""
        if self._gradients is None:
            return
        self._remaining -= 1
        current, previous, self._pending = weight_gradient(gradient, rows, ends), self._pending, None
        if previous is not None or not self._remaining:
            accumulate(self._gradients, previous, current)
        else:
            self._pending = current


class _Sums:
    """Sums over ranks of chunks of the tokens, one after another, as one tensor like `hidden`."""

    def __init__(self, dispatcher: TokenDispatcher, hidden: Tensor, chunks: int) -> None:
        self._dispatcher = dispatcher
        self._result = torch.empty_like(hidden) if chunks > 1 else None
        self._targets = [None] if self._result is None else dispatcher.chunks(self._result)
        self._pending: list[PendingTensor] = []

    def add(self, partials: Tensor) -> None:
        """Send this rank's partial sums of the next chunk."""
        self._pending.append(self._dispatcher.reduce_scatter(partials, self._targets[len(self._pending)]))

    def value(self) -> Tensor:
        sums = [pending.value() for pending in self._pending]
        return sums[0] if self._result is None else self._result
