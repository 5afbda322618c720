"""Modules for layers without Transformer Engine, where Megatron-Core's own refuse sequence parallelism or packing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """RMSNorm computed in float32, as HuggingFace's models compute it.

        y = weight * x / sqrt(mean(x^2) + eps)

    With sequence parallelism each rank sees part of the sequence, and the gradient of the weight is summed over tp
    ranks: the weight says so. The same holds for the norms of query and key heads, of which each rank has some.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) of any floating dtype -> the same."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class CoreAttention(MegatronModule):
    """Causal attention with grouped queries over fixed-length or packed sequences.

    Raises:
        ValueError: context parallelism, which only Transformer Engine's attention has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine's attention")
        self.softmax_scale = softmax_scale

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
            key: [s, b, groups, head_dim], or packed [t, groups, head_dim]; `value` likewise.
            attention_mask: not looked at, the mask is causal; `attn_mask_type` and `attention_bias` likewise.
            packed_seq_params: where the packed sequences begin and end.

        Returns:
            [s, b, heads * head_dim], or packed [t, heads * head_dim].
        """
        if packed_seq_params is None:
            batch_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return self._attend(*batch_first).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        lengths = bounds.diff().tolist()
        outputs = [
            self._attend(*(tensor.transpose(0, 1) for tensor in sequence)).transpose(0, 1).flatten(1)
            for sequence in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
            if len(sequence[0])
        ]
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[..., heads, s, head_dim] with key and value [..., groups, s, head_dim] -> as the query."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


class ValueHead(torch.nn.Module):
    """One value a token in place of logits, computed in float32. Called by GPTModel as its output layer is."""

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        setattr(self.weight, "is_embedding_or_output_parameter", True)  # noqa: B010

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, hidden], or this tp rank's part of the sequence -> float32 [s, b, 1] of the whole sequence."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every tp rank computes the same loss from all values, so each takes back the gradient of its own part.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None
