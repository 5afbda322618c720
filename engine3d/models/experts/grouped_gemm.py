"""Grouped GEMMs of a rank's experts: one kernel each for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sums
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine3d.platform.peer_memory import sum_in_order

CAPABILITY = 9
"""Major compute capability of GPUs with a reliable kernel in PyTorch: Hopper.

On Blackwell the gradient of an expert without tokens may be anything (https://github.com/pytorch/pytorch/issues/172439).
"""


def grouped_linear(
    tokens: Tensor, counts: Sequence[int], weights: Tensor, gradients: Tensor | None, parameter: Tensor
) -> Tensor:
    """Multiply each token by its expert's weight.

        y[t] = weights[e] @ tokens[t], for the tokens t of expert e

    The backward pass adds the gradient of the weights to `gradients`, where Megatron-Core expects it. Each call's is
    rounded to the dtype of the weights before that, as it is where the two are not fused.

    Args:
        tokens: (M, K), those of the first expert first.
        counts: tokens of each expert; their sum is M.
        weights: (E, N, K), of the dtype of the tokens.
        gradients: (E, N, K) of any floating dtype, or None for weights that are not trained.
        parameter: one that says whether gradients are needed, though the tokens may need none.

    Returns:
        (M, N), of the dtype of the tokens.
    """
    ends = torch.tensor(list(running_sums(counts)), dtype=torch.int32, pin_memory=tokens.is_cuda)
    ends = ends.to(tokens.device, non_blocking=True)
    result: Tensor = _GroupedLinear.apply(tokens, ends, weights, gradients, parameter)  # type: ignore[no-untyped-call]
    return result


def grouped_gemm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(M, in) and (E, in, out) -> (M, out): each row times its expert's weight. An expert's rows end at `ends`."""
    if not len(rows):
        return rows.new_empty(0, weights.shape[2])
    return F.grouped_mm(rows, weights, offs=ends)


def weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor | None:
    """Gradients of weights, (E, out, in), from that of their output (M, out) and rows (M, in); None without rows."""
    return F.grouped_mm(gradient.t(), rows, offs=ends) if len(rows) else None


def accumulate(gradients: Tensor, first: Tensor | None, second: Tensor | None = None) -> None:
    """Add the `weight_gradient` of one or two chunks of rows to gradients of weights, in float32, and round once."""
    terms = [term for term in (first, second) if term is not None]
    if len(terms) == 1:
        gradients.add_(terms[0])
    elif terms and gradients.is_cuda:
        from engine3d.models.experts.kernels import add_both

        add_both(gradients, *terms)
    elif terms:
        sum_in_order((gradients, *terms), gradients)


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """True if tensors of one shape lie one after another in memory."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    start = first.data_ptr()
    return (
        first.is_contiguous()
        and first.untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr()
        and all(tensor.data_ptr() == start + number * step for number, tensor in enumerate(tensors))
    )


def stacked_view(first: Tensor, count: int) -> Tensor:
    """View `count` adjacent tensors, of which `first` is the first, as one (count, *shape); see `are_adjacent`."""
    return first.detach().as_strided((count, *first.shape), (first.numel(), *first.stride()))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, ends: Tensor, weights: Tensor, gradients: Tensor | None, parameter: Tensor
    ) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.weights, ctx.gradients = weights, gradients
        return grouped_gemm(tokens, weights.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        tokens, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        tokens_gradient = grouped_gemm(gradient, ctx.weights, ends) if ctx.needs_input_grad[0] else None
        if ctx.gradients is not None:
            accumulate(ctx.gradients, weight_gradient(gradient, tokens, ends))
        return tokens_gradient, None, None, None, None
