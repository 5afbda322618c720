"""Reductions over the tokens of each sample, of samples end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


def segment_reduce(
    column: Tensor, lengths: Tensor, reduction: Literal["sum", "min", "max"] = "sum", *, initial: float = 0.0
) -> Tensor:
    """Reduce a column over the tokens of each sample; the same bits on every run, differentiable.

    An `index_add` would add tokens in another order on every run on a GPU. `torch.segment_reduce` fails without any
    sample, which is what a rank has in a micro-batch that only other ranks have samples for.

    Args:
        column: (R,) values of the tokens of B samples, end to end.
        lengths: (B,) int64 tokens of each sample.
        reduction: of the tokens of a sample.
        initial: the value of a sample without tokens, which enters every other reduction too.

    Returns:
        (B,) of the column's dtype; without samples the empty column itself, through which gradients flow.
    """
    if not len(lengths):
        return column
    return torch.segment_reduce(column, reduction, lengths=lengths, initial=initial)
