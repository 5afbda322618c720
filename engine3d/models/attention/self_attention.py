"""Megatron-Core's self-attention, with fused norms and rotary embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from engine3d.models.attention.context_parallel import rank_order
from engine3d.models.attention.normed_rotary import normed_and_rotated
from engine3d.models.attention.split_on_demand import SplitSelfAttention
from engine3d.models.local_modules import RMSNorm

_POSITIONS = "positions_of_tokens"
"""Attribute of a micro-batch's PackedSeqParams, which all layers share, with the result of `_packed_positions`."""


@dataclass(frozen=True)
class _Rotary:
    """Rotary embedding of the queries and keys of a call.

    Args:
        angles: (S, 1, 1, head_dim) float32.
        packed: bounds of packed sequences; None where there is one a row.
        cp: ranks over which the packed sequences are split.
        cp_rank: this rank of them.
    """

    angles: Tensor
    packed: PackedSeqParams | None
    cp: int
    cp_rank: int

    def positions(self, length: int, rows: int) -> Tensor:
        """(length * rows,) int32 of the tokens of an [s, b] micro-batch."""
        if self.packed is not None:
            return _packed_positions(self.packed, length, self.cp, self.cp_rank)
        return torch.arange(length, dtype=torch.int32, device=self.angles.device).repeat_interleave(rows)


class FusedSelfAttention(SplitSelfAttention):
    """Self-attention whose queries and keys are made by `normed_and_rotated`, where that equals Megatron-Core's result.

    Modules, parameters and their names are Megatron-Core's.
    """

    _rotary: _Rotary | None = None
    """Rotary embedding of the current call. Each call sets its own, also when a layer is computed again."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden], with sequence parallelism a shard of s on each tp rank -> the same, and a bias.

        Args:
            hidden_states: of the layer's tokens; packed ones have b = 1.
            attention_mask: goes to the core, like all of `others`.
            rotary_pos_emb: (S, 1, 1, head_dim) float32, or that of queries and that of keys.
            packed_seq_params: bounds of packed sequences.
            others: further arguments of Megatron-Core's; those that training does not need are not fused.
        """
        arguments = {"packed_seq_params": packed_seq_params, **others}
        if why_not_fused(self, rotary_pos_emb, packed_seq_params, others) is not None:
            return super().forward(  # type: ignore[no-any-return]
                hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **arguments
            )
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        assert angles is not None
        group = None if packed_seq_params is None else packed_seq_params.cp_group
        cp, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
        self._rotary = _Rotary(angles, packed_seq_params, cp, cp_rank)
        try:
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **arguments)  # type: ignore[no-any-return]
        finally:
            self._rotary = None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Queries [s, b, heads, head_dim], keys and values [s, b, groups, head_dim] of this tp rank, with the complete
        s.
        """
        if self._rotary is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, _ = self.linear_qkv(hidden_states)
        length, rows, _ = mixed.shape
        made = normed_and_rotated(
            mixed.flatten(0, 1),
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            self._rotary.angles,
            self._rotary.positions(length, rows),
            groups=self.num_query_groups_per_partition,
            eps=self.q_layernorm.eps,
        )
        return tuple(tensor.unflatten(0, (length, rows)) for tensor in made)


def why_not_fused(
    attention: SplitSelfAttention,
    rotary: Tensor | tuple[Tensor, Tensor] | None,
    packed: PackedSeqParams | None,
    others: dict[str, Any],
) -> str | None:
    """Reason for which Megatron-Core's own operations make the queries and keys of a call; None where they are fused.

    Args:
        attention: the layer.
        rotary: its rotary embedding, or that of queries and that of keys.
        packed: bounds of packed sequences.
        others: further arguments of the call.
    """
    config = attention.config
    angles, of_keys = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    norms = attention.q_layernorm, attention.k_layernorm
    reasons = {
        "norms that are no plain RMSNorm": not all(isinstance(norm, RMSNorm) for norm in norms),
        "norms with weights around 0": config.layernorm_zero_centered_gamma,
        "an output gate": config.attention_output_gate,
        "layers without rotary embedding": config.no_rope_freq,
        "interleaved rotary embedding": config.rotary_interleaved,
        "scaled rotary embedding": attention._yarn_concentration_factor != 1.0,
        "fewer groups than tp ranks": attention.config.num_query_groups < attention.world_size,
        "a test of Megatron-Core's": config.test_mode,
        "no rotary embedding": angles is None or of_keys is None,
        "another rotary embedding for keys": of_keys is not angles,
        "a rotary embedding of a part of a head, or of separate rows": angles is not None
        and angles.shape[1:] != (1, 1, attention.hidden_size_per_attention_head),
        "packing that is not thd": packed is not None and packed.qkv_format != "thd",
    }
    reasons |= {name: value is not None for name, value in others.items()}
    return next((name for name, holds in reasons.items() if holds), None)


def _packed_positions(packed: PackedSeqParams, count: int, cp: int = 1, cp_rank: int = 0) -> Tensor:
    """(count,) int32, the position of each token in its sequence, computed once for all layers.

    Args:
        packed: with the bounds of sequences, padded ones where present, as Megatron-Core's rotary embedding has them.
        count: tokens of the micro-batch on this rank.
        cp: ranks over which the sequences are split.
        cp_rank: this rank of them.
    """
    positions: Tensor | None = getattr(packed, _POSITIONS, None)
    if positions is None:
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        token = torch.arange(count, dtype=torch.int32, device=bounds.device)
        if cp > 1:
            token = rank_order(bounds, count * cp, cp).chunk(cp)[cp_rank].int()
        positions = token - bounds[torch.searchsorted(bounds, token, right=True) - 1].int()
        setattr(packed, _POSITIONS, positions)
    return positions
