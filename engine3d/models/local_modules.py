"""Modules in place of Megatron-Core's own, where those refuse sequence parallelism, packing, or a model's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from engine3d.models.attention.context_parallel import rank_order
from engine3d.models.attention.split_on_demand import SplitOnDemand
from engine3d.platform.sink_attention import attend_with_sinks, seen_keys

_LATENT_MODULES = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class RMSNorm(torch.nn.Module):
    """RMSNorm computed in float32, as HuggingFace's models compute it.

        y = weight * x / sqrt(mean(x^2) + eps)

    Norms with weights around zero multiply by 1 + weight, in float32.

    With sequence parallelism each rank sees part of the sequence, and the gradient of the weight is summed over tp
    ranks: the weight says so. The same holds for the norms of query and key heads, of which each rank has some.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        device = torch.cuda.current_device()
        weight = torch.full((hidden_size,), float(not self.centred), dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) of any floating dtype -> the same."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.centred:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class CoreAttention(MegatronModule):
    """Causal attention with grouped queries over fixed-length or packed sequences.

    Where packed sequences are split over context-parallel ranks, each has queries in the order of `rank_order`. It
    gathers the keys and values of all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            count = config.num_attention_heads // config.tensor_model_parallel_size
            options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            self.softmax_offset = torch.nn.Parameter(torch.zeros(count, **options))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend to the same and earlier positions of the same sequence.

        Args:
            query: [s, b, heads, head_dim], or packed [t, heads, head_dim].
            key: [s, b, groups, head_dim], or packed [t, groups, head_dim]; `value` likewise, with its own head_dim.
            attention_mask: not looked at, the mask is causal; `attn_mask_type` and `attention_bias` likewise.
            packed_seq_params: bounds of the packed sequences; of split ones those of all ranks of `cp_group`, where t
                is a rank's share.

        Returns:
            [s, b, heads * head_dim], or packed [t, heads * head_dim], of the value's head_dim.
        """
        if packed_seq_params is None:
            mask = _mask(len(key), None, key.device, self.window)
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return self._attend(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        group = packed_seq_params.cp_group
        lengths, ranks = bounds.diff().tolist(), 1 if group is None else group.size()
        if group is not None:
            in_sequence = rank_order(bounds, len(key) * ranks, ranks).argsort()
            key, value = (
                gather_from_sequence_parallel_region(tensor, group=group)[in_sequence] for tensor in (key, value)
            )
        shares = query.split([length // ranks for length in lengths])
        masks = {length: _mask(length, group, bounds.device, self.window) for length in set(lengths)}
        outputs = [
            self._attend(queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), mask=masks[len(keys)])
            .transpose(0, 1)
            .flatten(1)
            for queries, keys, values in zip(shares, key.split(lengths), value.split(lengths), strict=True)
            if len(keys)
        ]
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """[..., heads, s, head_dim] with key and value [..., groups, s, head_dim] -> as the query, of value's width."""
        if self.softmax_offset is not None:
            if mask is None:
                mask = seen_keys(torch.arange(query.shape[-2], device=query.device), key.shape[-2], None)
            return attend_with_sinks(query, key, value, self.softmax_offset, mask, self.softmax_scale)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )


def _mask(length: int, group: ProcessGroup | None, device: torch.device, window: int | None) -> Tensor | None:
    """(length / ranks, length) bool: the keys of a sequence that this rank's queries attend to; None for causal."""
    if group is None:
        if window is None or length <= window:
            return None
        positions = torch.arange(length, device=device)
    else:
        ranks = group.size()
        positions = rank_order(torch.tensor([0, length], device=device), length, ranks).chunk(ranks)[group.rank()]
    return seen_keys(positions, length, window)


class LatentAttention(SplitOnDemand, MLASelfAttention):
    """Megatron-Core's latent attention, with the modules that its specification names and with whole gradients.

    Megatron-Core's own puts a norm before the query projection where there are no latent queries. And where the
    projection to latent keys and values is cut over tp ranks, it loses what the other ranks' heads add to the gradient
    of the rotary part of the keys.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _LATENT_MODULES}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> Any:
        """Megatron-Core's result. It refuses a `local_cp_size`, because it asks the layer's group (`SplitOnDemand`)."""
        if packed_seq_params is not None and packed_seq_params.local_cp_size is not None:
            packed_seq_params = replace(packed_seq_params, local_cp_size=None)
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **others
        )

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[s / tp, b, hidden] -> latent queries (or the hidden state) and latent keys and values, [s / tp, b, ...].

        Without sequence parallelism the first dimension is s. Keys and values have all their elements, as they do where
        the projection is not cut: then Megatron-Core gathers the rotary part over the sequence, and on the way back
        sums its gradient over ranks.
        """
        queries, keys_and_values = super()._qkv_down_projection(hidden_states)
        if keys_and_values.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            keys_and_values = gather_from_tensor_model_parallel_region(keys_and_values, group=self.tp_group)
            if self.config.sequence_parallel:
                keys_and_values = scatter_to_sequence_parallel_region(keys_and_values, group=self.tp_group)
        return queries, keys_and_values


class ValueHead(torch.nn.Module):
    """One value a token in place of logits, computed in float32. Called by GPTModel as its output layer is."""

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup, *, bias: bool) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **options)) if bias else None
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
            setattr(parameter, "is_embedding_or_output_parameter", True)  # noqa: B010

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, hidden], or this tp rank's shard of the sequence -> float32 [s, b, 1] of the complete sequence."""
        values = F.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        if self.sequence_parallel:
            # Every tp rank computes the same loss from all values, so each takes back the gradient of its own shard.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None
