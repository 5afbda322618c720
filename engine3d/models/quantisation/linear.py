"""Linear layers in fp8 where a device has no kernels for them: GEMMs of operands that are quantised and dequantised.

Weights have blocks of 128 x 128, those that engines hold, and inputs groups of 128 elements of a row. Values of fp8
times a power of two are exact in bfloat16, so that a GEMM of the dequantised operands that sums in float32 is one of
the quantised operands. The backward pass computes with the same operands and leaves gradients as they are, as
Transformer Engine's Float8BlockScaling does with `backward_override="dequantized"`. By default that quantises gradients
too, and the inputs of weight gradients along tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from engine3d.models.precision import rounded, rounded_rows


class _Straight(torch.autograd.Function):
    """Other values in place of a tensor's, with the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _operands(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        quantised = rounded_rows(rows), rounded(weight)
    straight: tuple[Tensor, Tensor] = tuple(  # type: ignore[assignment]
        _Straight.apply(tensor, values)  # type: ignore[no-untyped-call]
        for tensor, values in zip((rows, weight), quantised, strict=True)
    )
    return straight


class QuantisedColumns(ColumnParallelLinear):
    """Megatron-Core's linear layer with column parallelism, of quantised operands."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super()._forward_impl(*_operands(input, weight), *args, **kwargs)
        return output


class QuantisedRows(RowParallelLinear):
    """Megatron-Core's linear layer with row parallelism, of quantised operands."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super()._forward_impl(*_operands(input, weight), *args, **kwargs)
        return output


_QUANTISED = {ColumnParallelLinear: QuantisedColumns, RowParallelLinear: QuantisedRows}


def with_quantised_linears(node: Any, left_out: Collection[str] = ()) -> Any:
    """Replace Megatron-Core's linear layers by quantised ones in a specification of a layer or of its sub-module.

    Args:
        node: the specification.
        left_out: names of sub-modules that stay as they are.
    """
    quantised = partial(with_quantised_linears, left_out=left_out)
    if isinstance(node, partial):
        keywords = {name: quantised(value) for name, value in node.keywords.items()}
        return partial(node.func, *map(quantised, node.args), **keywords)
    if is_dataclass(node) and not isinstance(node, type):
        values = {field.name: getattr(node, field.name) for field in fields(node) if field.init}
        values = {name: value if name in left_out else quantised(value) for name, value in values.items()}
        return replace(node, **values)
    return _QUANTISED.get(node, node) if isinstance(node, type) else node
