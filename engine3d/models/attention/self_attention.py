"""Megatron-Core's self-attention, with norms and rotary embedding of queries and keys in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from engine3d.models.attention.normed_rotary import normed_and_rotated
from engine3d.models.local_modules import RMSNorm

_POSITIONS = "positions_of_tokens"
"""Attribute of a micro-batch's PackedSeqParams, which all layers are given: what `_packed_positions` found."""


@dataclass(frozen=True)
class _Turn:
    """What turns the queries and keys of a call.

    Args:
        angles: (S, 1, 1, head_dim) float32.
        packed: where packed sequences begin and end; None where there is one a row.
    """

    angles: Tensor
    packed: PackedSeqParams | None

    def positions(self, length: int, rows: int) -> Tensor:
        """(length * rows,) int32 of the tokens of an [s, b] micro-batch."""
        if self.packed is not None:
            return _packed_positions(self.packed, length)
        return torch.arange(length, dtype=torch.int32, device=self.angles.device).repeat_interleave(rows)


class FusedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention whose queries and keys are made by `normed_and_rotated`, wherever that is what Megatron-Core does.

    Modules, parameters and their names are Megatron-Core's.
    """

    _turn: _Turn | None = None
    """Of the call under way. Each sets its own, the second one of a layer that is computed again too."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden], of each tp rank a part of s with sequence parallelism -> the same, and a bias.

        Args:
            hidden_states: of the layer's tokens; packed ones have b = 1.
            attention_mask: goes to the core, like all of `others`.
            rotary_pos_emb: (S, 1, 1, head_dim) float32, or that of queries and that of keys.
            packed_seq_params: where packed sequences begin and end.
            others: further arguments of Megatron-Core's; what is more than training needs takes its own way.
        """
        arguments = {"packed_seq_params": packed_seq_params, **others}
        if why_apart(self, rotary_pos_emb, packed_seq_params, others) is not None:
            return super().forward(  # type: ignore[no-any-return]
                hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **arguments
            )
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        assert angles is not None
        self._turn = _Turn(angles, packed_seq_params)
        try:
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **arguments)  # type: ignore[no-any-return]
        finally:
            self._turn = None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Queries [s, b, heads, head_dim], keys and values [s, b, groups, head_dim] of this tp rank, s whole."""
        if self._turn is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, _ = self.linear_qkv(hidden_states)
        length, rows, _ = mixed.shape
        made = normed_and_rotated(
            mixed.flatten(0, 1),
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            self._turn.angles,
            self._turn.positions(length, rows),
            groups=self.num_query_groups_per_partition,
            eps=self.q_layernorm.eps,
        )
        return tuple(each.unflatten(0, (length, rows)) for each in made)


def why_apart(
    attention: SelfAttention,
    rotary: Tensor | tuple[Tensor, Tensor] | None,
    packed: PackedSeqParams | None,
    others: dict[str, Any],
) -> str | None:
    """Why Megatron-Core's own steps make the queries and keys of a call; None where they are one step.

    Args:
        attention: the layer.
        rotary: its rotary embedding, or that of queries and that of keys.
        packed: where packed sequences begin and end.
        others: further arguments of the call.
    """
    config = attention.config
    angles, of_keys = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    norms = attention.q_layernorm, attention.k_layernorm
    found = {
        "norms that are no plain RMSNorm": not all(isinstance(norm, RMSNorm) for norm in norms),
        "norms with weights around 0": config.layernorm_zero_centered_gamma,
        "an output gate": config.attention_output_gate,
        "layers without rotary embedding": config.no_rope_freq,
        "interleaved rotary embedding": config.rotary_interleaved,
        "scaled rotary embedding": attention._yarn_concentration_factor != 1.0,
        "fewer groups than tp ranks": attention.config.num_query_groups < attention.world_size,
        "context parallelism": attention.pg_collection.cp.size() > 1,
        "a test of Megatron-Core's": config.test_mode,
        "no rotary embedding": angles is None or of_keys is None,
        "another rotary embedding for keys": of_keys is not angles,
        "part of a head rotated, or rows apart": angles is not None
        and angles.shape[1:] != (1, 1, attention.hidden_size_per_attention_head),
        "packing that is not thd": packed is not None and packed.qkv_format != "thd",
    }
    found |= {name: value is not None for name, value in others.items()}
    return next((name for name, true in found.items() if true), None)


def _packed_positions(packed: PackedSeqParams, count: int) -> Tensor:
    """(count,) int32, the position of each token in its sequence: computed for the first layer that asks.

    Args:
        packed: with the bounds of sequences, padded ones where present, as Megatron-Core's rotary embedding has them.
        count: tokens of the micro-batch.
    """
    found: Tensor | None = getattr(packed, _POSITIONS, None)
    if found is None:
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        token = torch.arange(count, dtype=torch.int32, device=bounds.device)
        found = token - bounds[torch.searchsorted(bounds, token, right=True) - 1].int()
        setattr(packed, _POSITIONS, found)
    return found
