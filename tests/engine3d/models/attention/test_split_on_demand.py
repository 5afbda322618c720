"""The group that a micro-batch is split over, and layers that ask for it.

tests/engine3d/training/test_context_parallel.py compares results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention

from engine3d.models.attention.split_on_demand import SplitSelfAttention


def test_complete_sequences_pass_through_a_copy_whose_group_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[Any] = []

    def forward(layer: Any, hidden: torch.Tensor, mask: None, **others: Any) -> tuple[torch.Tensor, None]:
        layers.append(layer)
        return hidden, mask

    monkeypatch.setattr(Attention, "forward", forward)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    layer = SplitSelfAttention.__new__(SplitSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.pg_collection, layer.weight = SimpleNamespace(cp=group, tp="tp"), torch.nn.Parameter(torch.ones(2))
    for packed in (PackedSeqParams(cp_group=group), PackedSeqParams(local_cp_size=1), None):
        layer.forward(torch.zeros(1), None, packed_seq_params=packed)
    split, complete, padded = layers
    assert split is padded is layer
    assert layer.pg_collection.cp is group
    # What is computed again in the backward pass asks the copy, whatever micro-batch the layer has computed since.
    assert complete is not layer
    assert complete.weight is layer.weight
    assert (complete.pg_collection.cp.size(), complete.pg_collection.cp.rank()) == (1, 0)
    assert complete.pg_collection.tp == "tp"
