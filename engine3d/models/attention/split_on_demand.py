"""Attention over packed sequences that are split over context-parallel ranks, or are not."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention, SelfAttention
from torch import Tensor


class _OneRank:
    """A process group of this rank alone, as rotary embeddings ask it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class SplitOnDemand(Attention):  # type: ignore[misc]
    """Attention over packed sequences that are split over context-parallel ranks, or over complete ones.

    A micro-batch names the group over which it is split (`PackedSeqParams.cp_group`), or has a `local_cp_size` of 1.
    Core attention looks at them. Megatron-Core's rotary embedding asks the layer's `pg_collection` instead.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron-Core's forward pass.

        Complete sequences pass through a copy of the layer, with the same parameters, whose group is of one rank. What
        is computed again in the backward pass asks that copy, whatever micro-batch came next.
        """
        layer = self
        if packed_seq_params is not None and packed_seq_params.local_cp_size is not None:
            layer = copy.copy(self)
            layer.pg_collection = copy.copy(self.pg_collection)
            layer.pg_collection.cp = _OneRank()
        return super(SplitOnDemand, layer).forward(  # type: ignore[no-any-return]
            hidden_states, attention_mask, packed_seq_params=packed_seq_params, **others
        )


class SplitSelfAttention(SplitOnDemand, SelfAttention):  # type: ignore[misc]
    """Megatron-Core's self-attention over sequences that are split on demand."""
