"""Positions of packed sequences on context-parallel ranks."""

from __future__ import annotations

import torch

from engine3d.models.attention.context_parallel import rank_order


def test_each_rank_has_two_chunks_of_each_sequence() -> None:
    """The example in Transformer Engine's `attn_forward_func_with_cp`."""
    order = rank_order(torch.tensor([0, 8, 12], dtype=torch.int32), 12, 2)
    assert order.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert rank_order(torch.tensor([0, 4, 10]), 10, 1).tolist() == list(range(10))


def test_all_ranks_attend_to_as_many_positions() -> None:
    for ranks in (2, 3, 8):
        bounds = torch.tensor([0, 2, 5, 6]) * 2 * ranks
        positions = rank_order(bounds, 12 * ranks, ranks)
        starts = bounds[torch.searchsorted(bounds, positions, right=True) - 1]
        of_ranks = (positions - starts + 1).chunk(ranks)
        assert sorted(positions.tolist()) == list(range(12 * ranks))
        assert len({int(of_rank.sum()) for of_rank in of_ranks}) == 1
