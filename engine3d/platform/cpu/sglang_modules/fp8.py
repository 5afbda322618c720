"""SGLang's layers with weights in fp8 blocks on a CPU: GEMMs of the dequantised weights, in the dtype of their input.

Activations are not quantised, as SGLang's kernels for fp8 devices do, and nothing is kept dequantised.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def install() -> None:
    """Put these functions in the place of SGLang's, whose kernels are Triton's or need AMX."""
    from sglang.srt.layers.quantization import fp8, fp8_utils

    fp8.dispatch_w8a8_block_fp8_linear = lambda: _linear
    fp8.Fp8MoEMethod.apply = _experts
    # Of kv_b_proj, whose halves SGLang dequantises on CUDA and gives a single scale elsewhere.
    fp8_utils.block_quant_to_tensor_quant = _half_precision


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """SGLang's linear layer of block-quantised weights: (..., columns) to (..., rows)."""
    if input_scale is not None:
        raise ValueError("activations in fp8 have no CPU implementation")
    return torch.nn.functional.linear(input, _dequantised(weight, weight_scale, block_size, input.dtype), bias)


def _experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's experts of block-quantised weights, by its native experts."""
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    hidden = dispatch_output.hidden_states
    blocks = method.weight_block_size
    dequantised = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_dequantised(layer.w13_weight, layer.w13_weight_scale_inv, blocks, hidden.dtype),
        w2_weight=_dequantised(layer.w2_weight, layer.w2_weight_scale_inv, blocks, hidden.dtype),
    )
    output = fused_moe_native.moe_forward_native(
        dequantised, hidden, dispatch_output.topk_output, method.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)


def _half_precision(
    weight: torch.Tensor, scales: torch.Tensor, block_size: list[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SGLang's matrix with one scale, for block-quantised weights: in bfloat16, with none."""
    return _dequantised(weight, scales, block_size, torch.bfloat16), None


def _dequantised(weight: torch.Tensor, scales: torch.Tensor, block_size: list[int], dtype: torch.dtype) -> torch.Tensor:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    dequantised: torch.Tensor = block_quant_dequant(weight, scales, block_size, dtype)
    return dequantised
