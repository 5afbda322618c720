"""The matrix products of a rank's experts, all of them in one kernel each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine3d.platform.peer_memory import sum_in_order

CAPABILITY = 9
"""Major compute capability of the GPUs, Hopper's, for which PyTorch has a kernel that can be relied on.

On Blackwell the gradient of an expert without tokens may be anything (https://github.com/pytorch/pytorch/issues/172439).
"""


def grouped_product(
    tokens: Tensor, counts: Sequence[int], weights: Tensor, gradients: Tensor | None, parameter: Tensor
) -> Tensor:
    """Multiply each token by its expert's weight.

        y[t] = weights[e] @ tokens[t], for the tokens t of expert e

    The gradient of the weights is not returned: the backward pass adds it to `gradients`, where Megatron-Core wants it.
    Each call's is rounded to the dtype of the weights before that, as it is where the two are not fused.

    Args:
        tokens: (M, K), those of the first expert first.
        counts: of the tokens of each expert; their sum is M.
        weights: (E, N, K), of the dtype of the tokens.
        gradients: (E, N, K) of any floating dtype, or None for weights that are not trained.
        parameter: one that says whether gradients are wanted, though the tokens may need none.

    Returns:
        (M, N), of the dtype of the tokens.
    """
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=tokens.is_cuda)
    ends = ends.to(tokens.device, non_blocking=True)
    result: Tensor = _GroupedProduct.apply(tokens, ends, weights, gradients, parameter)  # type: ignore[no-untyped-call]
    return result


def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(M, in) and (E, in, out) -> (M, out): each row by its expert's weight, where those of an expert end at `ends`."""
    if not len(rows):
        return rows.new_empty(0, weights.shape[2])
    return F.grouped_mm(rows, weights, offs=ends)


def learned(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor | None:
    """Gradients of weights, (E, out, in), from that of their product (M, out) with rows (M, in); None without rows."""
    return F.grouped_mm(gradient.t(), rows, offs=ends) if len(rows) else None


def learn(gradients: Tensor, first: Tensor | None, second: Tensor | None = None) -> None:
    """Add what was `learned` of one or two parts of the rows to gradients of weights, in float32, and round once."""
    there = [part for part in (first, second) if part is not None]
    if len(there) == 1:
        gradients.add_(there[0])
    elif there and gradients.is_cuda:
        from engine3d.models.experts.kernels import add_both

        add_both(gradients, *there)
    elif there:
        sum_in_order((gradients, *there), gradients)


def are_one(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape lie one after another in memory."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    start = first.data_ptr()
    return (
        first.is_contiguous()
        and first.untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr()
        and all(tensor.data_ptr() == start + number * step for number, tensor in enumerate(tensors))
    )


def as_one(first: Tensor, number: int) -> Tensor:
    """The first of so many tensors, of which `are_one` is true, as one tensor (number, *shape) of all."""
    return first.detach().as_strided((number, *first.shape), (first.numel(), *first.stride()))


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, ends: Tensor, weights: Tensor, gradients: Tensor | None, parameter: Tensor
    ) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.weights, ctx.gradients = weights, gradients
        return product(tokens, weights.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        tokens, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_tokens = product(gradient, ctx.weights, ends) if ctx.needs_input_grad[0] else None
        if ctx.gradients is not None:
            learn(ctx.gradients, learned(gradient, tokens, ends))
        return of_tokens, None, None, None, None
