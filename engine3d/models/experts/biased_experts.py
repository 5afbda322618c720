"""Linear layers of experts with biases, and their activation, where there is no Transformer Engine.

Megatron-Core marks the last layer's bias as one whose gradient is to be summed over tp ranks, which have other experts.
It adds that bias in place, which autograd forbids in what a function of its own gave back.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


def scaled_sigmoid(x: Tensor) -> Tensor:
    """Compute x * sigmoid(1.702 * x), which is Megatron-Core's `quick_gelu` without a compiler."""
    return x * torch.sigmoid(1.702 * x)


class PairedColumns(ColumnParallelLinear):
    """First layer of an expert whose rows are those of gate and up in turn; its outputs are all gates, then all ups."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[tokens, hidden] -> [tokens, 2 * ffn] of this rank, and the bias, [2 * ffn]."""
        output, bias = super().forward(*args, **kwargs)
        return _unpaired(output), None if bias is None else _unpaired(bias)


class BiasedRows(RowParallelLinear):
    """Last layer of an expert, with a bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self.bias, "sequence_parallel", False)  # noqa: B010

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[tokens, ffn] -> [tokens, hidden] and the bias, [hidden]."""
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def _unpaired(values: Tensor) -> Tensor:
    """[..., 2 * n] with pairs of neighbours -> the first of all pairs, then the second."""
    return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
