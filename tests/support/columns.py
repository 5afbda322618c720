"""Columns that several tests of algorithms make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses.aggregation import AggregationMode, sequence_weights
from hybridflow.algorithms.losses.statistics import Statistics

MODES: list[tuple[AggregationMode, int | None]] = [
    ("token-mean", None),
    ("seq-mean-token-sum", None),
    ("seq-mean-token-mean", None),
    ("seq-mean-token-sum-norm", 16),
]


def random_mask(samples: int, width: int) -> Tensor:
    """(B, S') bool: responses of random lengths, one of them full."""
    lengths = torch.randint(0, width + 1, (samples,))
    lengths[0] = width
    return torch.arange(width) < lengths[:, None]


def mask_with_holes(samples: int, width: int) -> Tensor:
    """(B, S') bool: any tokens; the first row has all of them, the last has none."""
    mask = torch.rand(samples, width) < 0.6
    mask[0], mask[-1] = True, False
    return mask


def soiled(column: Tensor, mask: Tensor) -> Tensor:
    """The column with what must never be read outside the mask: nan, both infinities and large numbers."""
    dirt = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30])
    return column.where(mask, dirt.repeat(column.numel() // 4 + 1)[: column.numel()].view_as(column))


def token_weights(response_mask: Tensor, mode: AggregationMode, *, normalising_length: int | None = None) -> Tensor:
    """`sequence_weights` at each token: (B, S') bool -> (B, S') float32, 0 outside the mask."""
    weights = sequence_weights(response_mask.sum(dim=1), mode, normalising_length=normalising_length)
    return weights[:, None] * response_mask


Loss = Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Statistics]]
"""Loss of columns and weights."""


def check_pieces_add_up(
    loss: Loss, columns: dict[str, Tensor], weights: Tensor, learned: str, cuts: Sequence[Sequence[Tensor]]
) -> dict[str, float]:
    """Check that loss, gradient and statistics of the rows in pieces add up to those of all rows.

    Each piece is packed into one dimension, as the trainer packs it: prompts and padding gone or of weight 0. One more
    piece of each cut is empty, as the micro-batch of a rank that has fewer of them to fill than another.

    Args:
        learned: the column that carries the gradient.
        cuts: ways to cut the rows into pieces.

    Returns:
        The statistics of the whole.
    """
    columns[learned].requires_grad_()
    expected, whole_statistics = loss(columns, weights)
    (whole_gradient,) = torch.autograd.grad(expected, columns[learned])
    for cut in cuts:
        results = [
            loss({name: column[rows].flatten(0, 1) for name, column in columns.items()}, weights[rows].flatten())
            for rows in (*cut, torch.empty(0, dtype=torch.int64))
        ]
        total = torch.stack([value for value, _ in results]).sum()
        torch.testing.assert_close(total, expected)
        (gradient,) = torch.autograd.grad(total, columns[learned])
        torch.testing.assert_close(gradient, whole_gradient)
        merged = Statistics.merge(statistics for _, statistics in results).values()
        # A loss is summed in float32, and may be near 0.
        assert merged == pytest.approx(whole_statistics.values(), rel=1e-6, abs=1e-7)
    return merged
