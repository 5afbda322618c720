"""Packed sequences on the ranks of a context-parallel group."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_order(bounds: Tensor, count: int, ranks: int) -> Tensor:
    """The order in which ranks have the positions of packed sequences: rank 0's positions first, rising, then rank 1's.

    Each sequence is cut into 2 * ranks chunks of one length. Rank i has chunks i and 2 * ranks - 1 - i, so that the
    pairs of positions in causal attention are as many on all ranks. Transformer Engine's attention has the same order.

    Args:
        bounds: (K + 1,) bounds of the sequences, whose lengths are multiples of 2 * ranks.
        count: positions, which is the last bound.
        ranks: context parallel size.

    Returns:
        (count,) int64 positions, on the device of `bounds`; count / ranks of each rank.
    """
    lengths = bounds.diff()
    sequence = torch.repeat_interleave(lengths, output_size=count)
    chunk = (torch.arange(count, device=bounds.device) - bounds[sequence]) // (lengths // (2 * ranks))[sequence]
    return torch.minimum(chunk, 2 * ranks - 1 - chunk).argsort(stable=True)
