"""Attention whose queries, and whose keys, are normalised over all heads of a token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine3d.models.attention.split_on_demand import SplitSelfAttention


class HeadsNormedAttention(SplitSelfAttention):
    """Megatron-Core's self-attention with a norm over all query heads of a token, and one over all key heads.

    They are not Megatron-Core's `q_layernorm` and `k_layernorm`: it sums the gradients of parameters of these names
    over tp ranks, of which each has a part of these weights.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.query_norm = HeadsRMSNorm(config, config.num_attention_heads)
        self.key_norm = HeadsRMSNorm(config, config.num_query_groups)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Queries [s, b, heads, head_dim], keys and values [s, b, groups, head_dim] of this tp rank."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return self.query_norm(query), self.key_norm(key), value


class HeadsRMSNorm(torch.nn.Module):
    """RMSNorm over all heads of a token, of which each tp rank has some, with their part of the weight.

    Args:
        config: of the model.
        heads: of all ranks, which tp divides.
    """

    def __init__(self, config: TransformerConfig, heads: int) -> None:
        super().__init__()
        self.eps, self._elements = config.layernorm_epsilon, heads * config.kv_channels
        count = self._elements // config.tensor_model_parallel_size
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(count, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., heads of this rank, head_dim) of any floating dtype -> the same."""
        wide = x.flatten(-2).float()
        # Each rank's squares scale the heads of all ranks, so that their gradient is summed over ranks too.
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)
        wide = wide * torch.rsqrt(squares / self._elements + self.eps)
        return (self.weight * wide.to(x.dtype)).view_as(x)
