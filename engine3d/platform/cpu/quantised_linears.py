"""Megatron-Core's linear layers in fp8 on a CPU: GEMMs of operands that are quantised and dequantised.

Values of fp8 times a power of two are exact in bfloat16, so that a GEMM of the dequantised operands that sums in
float32 is one of the quantised operands. The backward pass computes with the same operands and leaves gradients as they
are, as Transformer Engine's Float8BlockScaling does with `backward_override="dequantized"`. By default that quantises
gradients too, and the inputs of weight gradients along tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class _Straight(torch.autograd.Function):
    """Other values in place of a tensor's, with the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@cache
def quantised_linears(
    inputs: Callable[[Tensor], Tensor], weights: Callable[[Tensor], Tensor]
) -> Mapping[type[torch.nn.Module], type[torch.nn.Module]]:
    """See `Platform.quantised_linears`."""

    def operands(rows: Tensor, weight: Tensor) -> list[Tensor]:
        with torch.no_grad():
            rounded = inputs(rows), weights(weight)
        return [
            _Straight.apply(tensor, values)  # type: ignore[no-untyped-call]
            for tensor, values in zip((rows, weight), rounded, strict=True)
        ]

    class QuantisedColumns(ColumnParallelLinear):
        """Column parallelism."""

        def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = super()._forward_impl(*operands(input, weight), *args, **kwargs)
            return output

    class QuantisedRows(RowParallelLinear):
        """Row parallelism."""

        def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = super()._forward_impl(*operands(input, weight), *args, **kwargs)
            return output

    return {ColumnParallelLinear: QuantisedColumns, RowParallelLinear: QuantisedRows}
