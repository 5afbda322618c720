"""Log-probs and entropies of next tokens from hidden states, without the logits of all tokens at a time.

The output layer is applied to one piece of the tokens after another. A few figures of each token stay. The backward
pass makes the logits of a piece once more, writes their gradient over them, and multiplies it with the layer's weights
and inputs: one more product with these weights, for memory of one piece of logits in place of a micro-batch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engine3d.training.vocab_parallel import Slopes, VocabularyPart, pieces, top_tokens


def logprobs_of_states(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    choices: Tensor | None = None,
    *,
    piece: int,
    vocabulary: int,
    group: ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
    top: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`logprobs_of_choices` and `top_tokens` of the logits `states @ weight.T`.

    The gradient of the weights is added to their `main_grad` where they have one, as Megatron-Core's own layers do
    with apex; else it is returned to autograd. That of the states is this rank's part: the sum over the group is theirs
    to take who made the states the same on all its ranks.

    Args:
        states: (N, H) hidden states, the same on all ranks of the group.
        weight: (V / tp, H) this rank's rows of the output layer.
        targets: (N,) int64 global token ids.
        choices: (N, k) int64 global token ids whose log-probs are asked for; the most likely ones if None.
        piece: tokens whose logits are there at a time.
        vocabulary, group, temperature, with_entropy: as in `logprobs_and_entropy`.
        top: how many of the most likely tokens to find; without a gradient.

    Returns:
        (N,) float32 log-probs of the targets, (N,) float32 entropies, (N, k) float32 log-probs of the choices, or None,
        and (N, top) int64 most likely tokens, or None.
    """
    found: tuple[Tensor, Tensor, Tensor | None, Tensor | None] = _OfStates.apply(
        states, weight, targets, choices, piece, vocabulary, group, temperature, with_entropy, top
    )
    return found


class _OfStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        choices: Tensor | None,
        piece: int,
        vocabulary: int,
        group: ProcessGroup,
        temperature: float,
        with_entropy: bool,
        top: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        part = VocabularyPart.of(weight.shape[0], vocabulary, group, temperature)
        local = targets - part.first
        count = 0 if choices is None and not top else top if choices is None else choices.shape[1]
        facts = torch.empty(4, len(states), dtype=torch.float32, device=states.device)
        at = facts.new_empty(len(states), count) if count else None
        best = targets.new_empty(len(states), top) if top else None
        wanted = best if choices is None else choices
        for rows in pieces(len(states), piece):
            logits = states[rows] @ weight.t()
            facts[:, rows] = part.facts(logits, local[rows])
            if best is not None:
                best[rows] = top_tokens(logits, top, vocabulary=vocabulary, group=group)
            if at is not None and wanted is not None:
                at[rows] = part.at(logits, wanted[rows] - part.first)
            del logits  # before the next piece's
        places = None if wanted is None else wanted - part.first
        found = part.of_all_ranks(facts, local, at, places, with_entropy=with_entropy)
        ctx.set_materialize_grads(False)
        if best is not None:
            ctx.mark_non_differentiable(best)
        ctx.save_for_backward(states, weight, local, places, *found.kept)
        ctx.settings = (part, piece, with_entropy, getattr(weight, "main_grad", None))
        return found.logprobs, found.entropy, found.choices, best

    @staticmethod
    def backward(
        ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None, of_choices: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        states, weight, local, places, *kept = ctx.saved_tensors
        part, piece, with_entropy, main_gradient = ctx.settings
        slopes = Slopes.of(kept[0], of_logprob, of_entropy if with_entropy else None, of_choices)
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = main_gradient if ctx.needs_input_grad[1] else None
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in pieces(len(states), piece):
            logits = states[rows] @ weight.t()
            own = [None if each is None else each[rows] for each in (places, *kept)]
            part.write_gradient(logits, local[rows], own[0], own[1:], slopes.rows(rows), logits)
            if of_states is not None:
                torch.matmul(logits, weight, out=of_states[rows])
            if of_weight is not None:
                _add_product(of_weight, logits.t(), states[rows])
            del logits
        returned = of_weight.to(weight.dtype) if of_weight is not None and main_gradient is None else None
        return of_states, returned, *[None] * 8


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, rounded once, and without room for the product where the device's libraries can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
