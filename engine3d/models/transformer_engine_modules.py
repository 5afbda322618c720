"""Layers in place of Transformer Engine's where those keep a GPU waiting for Python. Needs Transformer Engine.

Its grouped layer multiplies the weights' gradients expert by expert, with a launch for each; its RMSNorm goes through a
fuser of operations. The kernels of the norm, the parameters and everything else are Transformer Engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, get_dummy_wgrad
from transformer_engine.pytorch.ops.basic.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

from engine3d.models.experts.fused_experts import Weights
from engine3d.models.experts.grouped_gemm import CAPABILITY, are_adjacent, grouped_linear, stacked_view
from engine3d.models.local_modules import RMSNorm
from engine3d.models.sizes import ROW_ELEMENTS

COLUMN_PARALLEL = (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TEColumnParallelGroupedLinear)
"""Linear layers with a weight whose rows are cut over ranks."""
ROW_PARALLEL = (TERowParallelLinear, TERowParallelGroupedLinear)
"""Linear layers with a weight whose columns are."""


def may_group(config: TransformerConfig) -> bool:
    """True if experts may be `GroupedColumns` and `GroupedRows`: without what only Transformer Engine's have."""
    other = config.add_bias_linear or config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
    quantized = config.fp8 or config.fp4 or config.quant_recipe is not None
    return not (other or quantized or getattr(config, "moe_single_grouped_weight", False))


class _Grouped:
    """Mixin of a grouped linear layer of bf16 weights that is a grouped GEMM: one kernel for all experts.

    Megatron-Core's buffers are filled from the last registered parameter to the first, so the last expert is registered
    first: then experts ascend in memory, there as here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names = [f"weight{number}" for number in range(self.num_gemms)]  # type: ignore[attr-defined]
        parameters = self._parameters  # type: ignore[attr-defined]
        block = torch.stack([parameters[name].detach() for name in self._names])
        for name, weight in zip(reversed(self._names), reversed(block.unbind()), strict=True):
            parameters[name] = parameters.pop(name)
            parameters[name].data = weight
        # Addresses that were checked to be one block, with gradients and without: a check of each expert takes as long
        # as the launch of several kernels.
        self._addresses: dict[bool, tuple[object, ...]] = {}

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """(tokens of all experts, in) and the number of each one's -> (tokens of all experts, out), and no bias."""
        weights = self.together(x.dtype)
        if weights is None:
            return super().forward(x, m_splits)  # type: ignore[misc, no-any-return]
        tokens = x.reshape(-1, x.shape[-1])
        return grouped_linear(tokens, m_splits, weights.values, weights.gradients, weights.parameter), None

    def together(self, dtype: torch.dtype) -> Weights | None:
        """The weights of all experts as one tensor, and their gradients.

        Args:
            dtype: of their inputs.

        Returns:
            None where either is not one block, or there is no kernel for such a product.
        """
        first, last = (self._parameters[self._names[end]] for end in (0, -1))  # type: ignore[attr-defined]
        trained = torch.is_grad_enabled() and first.requires_grad
        if trained and not hasattr(first, "main_grad"):
            return None
        ends = [first, last, first.main_grad, last.main_grad] if trained else [first, last]
        addresses = (dtype, *(end.data_ptr() for end in ends))
        if addresses != self._addresses.get(trained) and not self._are_adjacent(dtype, trained):
            return None
        self._addresses[trained] = addresses
        gradients = stacked_view(first.main_grad, len(self._names)) if trained else None
        return Weights(stacked_view(first, len(self._names)), gradients, first)

    def _are_adjacent(self, dtype: torch.dtype, trained: bool) -> bool:
        """True if all weights, and their gradients, are adjacent in memory, and a grouped GEMM can multiply them."""
        parameters = [self._parameters[name] for name in self._names]  # type: ignore[attr-defined]
        gradients = not trained or are_adjacent([parameter.main_grad for parameter in parameters])
        return self.has_kernel(dtype, parameters[0]) and gradients and are_adjacent(parameters)

    def has_kernel(self, dtype: torch.dtype, weight: Tensor) -> bool:
        """True if PyTorch has a reliable kernel: for bf16, complete rows, and this GPU."""
        complete = all(size % ROW_ELEMENTS == 0 for size in weight.shape)
        return (
            complete and dtype == weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] == CAPABILITY
        )


class GroupedColumns(_Grouped, TEColumnParallelGroupedLinear):  # type: ignore[misc]
    """The first layer of experts."""


class GroupedRows(_Grouped, TERowParallelGroupedLinear):  # type: ignore[misc]
    """The last layer of experts."""


def take_dummy_gradients(model: torch.nn.Module) -> None:
    """Allocate the placeholders that Transformer Engine gives autograd for gradients that it adds to a buffer itself.

    It would allocate one for each shape of a weight in the first backward pass, and keeps it.
    """
    for module in model.modules():
        if getattr(module, "fuse_wgrad_accumulation", False) and not isinstance(module, _Grouped):
            for weight in module.parameters(recurse=False):
                if weight.requires_grad and weight.dim() == 2:
                    get_dummy_wgrad(list(weight.shape), weight.dtype)


def release_quantised_weights(model: torch.nn.Module) -> None:
    """Free the quantised weights that linear layers keep after a pass. The first micro-batch of each pass quantises.

    A pass with gradients needs them in two layouts, of one byte an element each.
    """
    for module in model.modules():
        if isinstance(module, TransformerEngineBaseModule):
            module._fp8_workspaces.clear()


class KernelRMSNorm(RMSNorm):
    """RMSNorm by Transformer Engine's kernels."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) of any floating dtype -> the same shape in the weight's dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by Transformer Engine's kernels: (..., hidden) of any floating dtype -> that in the weight's dtype."""
    normed: Tensor = _Normed.apply(x.to(weight.dtype), weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        result, _, scales = rmsnorm_fwd(rows, weight, eps, None, None, TE_DType[weight.dtype], 0, False)
        ctx.save_for_backward(rows, weight, scales)
        return result.view(x.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        of_rows, of_weight = rmsnorm_bwd(gradient.reshape(rows.shape).contiguous(), rows, scales, weight, 0, False)
        return of_rows.view(gradient.shape), of_weight, None
