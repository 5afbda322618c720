"""Gated delta net: linear attention over packed sequences, in place of a layer's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine3d.models.attention.context_parallel import rank_order
from engine3d.models.sizes import Delta
from engine3d.platform.delta_rule import causal_convolution, gated_delta_rule


@dataclass
class DeltaNetSubmodules:
    """The linear layers: they are built as Megatron-Core's attention builds its own.

    Args:
        in_proj: from the hidden state, its rows cut over tp ranks.
        out_proj: to the hidden state, its columns cut over tp ranks.
    """

    in_proj: Callable[..., Any]
    out_proj: Callable[..., Any]


class GatedDeltaNet(MegatronModule):
    """Megatron-Core's gated delta net without its kernels, which need a GPU, for packed sequences.

    Names of parameters, and the order of rows in them, are Megatron-Core's: queries, keys, values, output gate, beta
    and decay, of which each tp rank has those of its heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        delta: Delta,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
        **_others: Any,
    ) -> None:
        super().__init__(config)
        tp = pg_collection.tp.size()
        self.layer_number, self._delta = layer_number, delta
        self._keys, self._values, self._heads = delta.keys // tp, delta.values // tp, delta.value_heads // tp
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            2 * (delta.keys + delta.values + delta.value_heads),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            name=name and f"{name}.in_proj",
            **common,
        )
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        channels = 2 * self._keys + self._values
        self.conv1d = torch.nn.Conv1d(channels, channels, delta.kernel, groups=channels, bias=False, **options)
        self.dt_bias = torch.nn.Parameter(torch.ones(self._heads, **options))
        self.A_log = torch.nn.Parameter(torch.zeros(self._heads, **options))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.out_norm = GatedNorm(config, delta.value_dim)
        self.out_proj = submodules.out_proj(
            delta.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            name=name and f"{name}.out_proj",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden], with sequence parallelism a shard of s on each tp rank -> the same, and no bias.

        Args:
            hidden_states: of the layer's tokens; packed ones have b = 1.
            attention_mask: not looked at: padding is at the end of sequences.
            packed_seq_params: bounds of packed sequences; of split ones those of all ranks of `cp_group`, where s is a
                rank's share.
        """
        mixed, _ = self.in_proj(hidden_states)
        length, rows, _ = mixed.shape
        tokens = mixed.transpose(0, 1).flatten(0, 1)
        bounds = list(range(0, length * rows + 1, length))
        if packed_seq_params is not None:
            edges = packed_seq_params.cu_seqlens_q_padded
            bounds = (packed_seq_params.cu_seqlens_q if edges is None else edges).tolist()
        group = None if packed_seq_params is None else packed_seq_params.cp_group
        output = self._attend(tokens, bounds) if group is None else self._attend_split(tokens, bounds, group)
        output, bias = self.out_proj(output.unflatten(0, (rows, length)).transpose(0, 1).contiguous())
        return output, bias

    def _attend_split(self, tokens: Tensor, bounds: list[int], group: torch.distributed.ProcessGroup) -> Tensor:
        """Attend to sequences that are split over ranks: each has all tokens of a share of the heads meanwhile.

        Source: Megatron-Core's `GatedDeltaNet`.

        Args:
            tokens: of this rank, in the order of `rank_order`.
            bounds: of the sequences of all ranks.
            group: the ranks.
        """
        ranks, count = group.size(), len(tokens)
        order = rank_order(torch.tensor(bounds, device=tokens.device), count * ranks, ranks)
        kinds = tokens.split([self._keys, self._keys, self._values, self._values, self._heads, self._heads], -1)
        shares = zip(*(kind.chunk(ranks, -1) for kind in kinds), strict=True)
        tokens = all_to_all(group, torch.cat([torch.cat(share, -1) for share in shares]))
        output = self._attend(tokens[order.argsort()], bounds, group.rank(), ranks)
        output = all_to_all(group, output[order].contiguous())
        return torch.cat(output.chunk(ranks), -1)

    def _attend(self, tokens: Tensor, bounds: list[int], share: int = 0, shares: int = 1) -> Tensor:
        """(T, rows of the first linear layer) -> (T, values).

        Args:
            tokens: of complete sequences, with the rows of a share of this rank's heads.
            bounds: of the sequences.
            share: number of the share.
            shares: that the heads are cut into.
        """
        delta = self._delta
        keys, values, heads = self._keys // shares, self._values // shares, self._heads // shares
        kinds = self.conv1d.weight[:, 0].split([self._keys, self._keys, self._values])
        weight = torch.cat([kind.chunk(shares)[share] for kind in kinds])
        a_log, dt_bias = (parameter.chunk(shares)[share] for parameter in (self.A_log, self.dt_bias))
        convolved, gate, beta, decay = tokens.split([2 * keys + values, values, heads, heads], -1)
        convolved = causal_convolution(convolved, weight, bounds)
        query, key, value = convolved.split([keys, keys, values], -1)
        attended, _ = gated_delta_rule(
            query.unflatten(-1, (-1, delta.key_dim)),
            key.unflatten(-1, (-1, delta.key_dim)),
            value.unflatten(-1, (-1, delta.value_dim)),
            log_decay(decay, a_log, dt_bias),
            beta.float().sigmoid(),
            bounds,
        )
        return self.out_norm(attended, gate.unflatten(-1, (-1, delta.value_dim))).flatten(1)


class GatedNorm(torch.nn.Module):
    """RMSNorm of each value head, whose weight is around one, times SiLU of the output gate, in float32.

    Every tp rank has the weight, and other heads: its gradient is summed over them, as those of other norms are.
    """

    def __init__(self, config: TransformerConfig, value_dim: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.ones(value_dim, **options))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, values: Tensor, gate: Tensor) -> Tensor:
        """(T, heads, value_dim) each, of any floating dtype -> the same."""
        wide = values.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide * F.silu(gate.float())).to(values.dtype)


def log_decay(decay: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Logarithm of the share of the state that remains: (T, heads) of any floating dtype -> float32, at most 0."""
    return -a_log.float().exp() * F.softplus(decay.float() + dt_bias.float())
