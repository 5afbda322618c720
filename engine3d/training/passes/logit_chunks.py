"""Log-probs and entropies of next tokens from hidden states, without the logits of all tokens at a time.

The output layer is applied to one chunk of the tokens after another. A few numbers of each token stay. The backward
pass computes the logits of a chunk again, writes their gradient over them, and multiplies it with the layer's weights
and inputs: one more GEMM with these weights, for memory of one chunk of logits in place of a micro-batch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engine3d.training.passes.vocab_parallel import Slopes, VocabularyShard, slices, top_tokens


def logprobs_of_states(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    choices: Tensor | None = None,
    *,
    chunk: int,
    vocabulary: int,
    group: ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
    top: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`logprobs_of_choices` and `top_tokens` of the logits `states @ weight.T`.

    The gradient of the weights is added to their `main_grad` where they have one, as Megatron-Core's own layers do
    with apex; else it is returned to autograd. That of the states is this rank's term: the caller, which made the
    states the same on all ranks of the group, takes the sum over it.

    Args:
        states: (N, H) hidden states, the same on all ranks of the group.
        weight: (V / tp, H) this rank's rows of the output layer.
        targets: (N,) int64 global token ids.
        choices: (N, k) int64 global token ids whose log-probs are requested; the most likely ones if None.
        chunk: tokens whose logits are in memory at a time.
        vocabulary, group, temperature, with_entropy: as in `logprobs_and_entropy`.
        top: number of most likely tokens to find; without a gradient.

    Returns:
        (N,) float32 log-probs of the targets, (N,) float32 entropies, (N, k) float32 log-probs of the choices, or None,
        and (N, top) int64 most likely tokens, or None.
    """
    result: tuple[Tensor, Tensor, Tensor | None, Tensor | None] = _LogProbsOfStates.apply(
        states, weight, targets, choices, chunk, vocabulary, group, temperature, with_entropy, top
    )
    return result


class _LogProbsOfStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        choices: Tensor | None,
        chunk: int,
        vocabulary: int,
        group: ProcessGroup,
        temperature: float,
        with_entropy: bool,
        top: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        shard = VocabularyShard.of(weight.shape[0], vocabulary, group, temperature)
        local = targets - shard.first
        count = 0 if choices is None and not top else top if choices is None else choices.shape[1]
        softmax_stats = torch.empty(4, len(states), dtype=torch.float32, device=states.device)
        at = softmax_stats.new_empty(len(states), count) if count else None
        best = targets.new_empty(len(states), top) if top else None
        requested = best if choices is None else choices
        for rows in slices(len(states), chunk):
            logits = states[rows] @ weight.t()
            softmax_stats[:, rows] = shard.softmax_stats(logits, local[rows])
            if best is not None:
                best[rows] = top_tokens(logits, top, vocabulary=vocabulary, group=group)
            if at is not None and requested is not None:
                at[rows] = shard.at(logits, requested[rows] - shard.first)
            del logits  # before those of the next chunk
        columns = None if requested is None else requested - shard.first
        result = shard.reduce(softmax_stats, local, at, columns, with_entropy=with_entropy)
        ctx.set_materialize_grads(False)
        if best is not None:
            ctx.mark_non_differentiable(best)
        ctx.save_for_backward(states, weight, local, columns, *result.kept)
        ctx.settings = (shard, chunk, with_entropy, getattr(weight, "main_grad", None))
        return result.logprobs, result.entropy, result.choices, best

    @staticmethod
    def backward(
        ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None, of_choices: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        states, weight, local, columns, *kept = ctx.saved_tensors
        shard, chunk, with_entropy, main_gradient = ctx.settings
        slopes = Slopes.of(kept[0], of_logprob, of_entropy if with_entropy else None, of_choices)
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = main_gradient if ctx.needs_input_grad[1] else None
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in slices(len(states), chunk):
            logits = states[rows] @ weight.t()
            of_rows = [None if tensor is None else tensor[rows] for tensor in (columns, *kept)]
            shard.write_gradient(logits, local[rows], of_rows[0], of_rows[1:], slopes.rows(rows), logits)
            if of_states is not None:
                torch.matmul(logits, weight, out=of_states[rows])
            if of_weight is not None:
                _add_product(of_weight, logits.t(), states[rows])
            del logits
        returned = of_weight.to(weight.dtype) if of_weight is not None and main_gradient is None else None
        return of_states, returned, *[None] * 8


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, rounded once, and without memory for the product where the device's libraries can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
