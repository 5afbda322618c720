"""Experts of other ranks left out of what a rank computes, where SGLang computes zeros for them.

With expert parallelism SGLang lays out a row for each of a token's experts, wherever that is: the kernel writes zeros
for those of other ranks, and the sum over a token's experts reads them. Here they get no rows, and the sum leaves them
out. That needs three of SGLang's functions to be used together, in the module of its Triton experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine3d.errors import EngineError

_LEAST = 3
"""Experts of a token: with fewer SGLang adds them up by other functions, or not at all."""

_prepares = False
"""Whether SGLang lays out rows for the kernels below; others, of quantized weights, have them by the same function."""
_experts: torch.Tensor | None = None
"""Of the tokens that are computed now: (T, K), -1 for those of other ranks. None where all rows are there."""


def register() -> None:
    """Hook SGLang's experts, in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
    HookRegistry.register(f"{module}._prepare_fused_moe_run", prepare, HookType.AROUND)
    HookRegistry.register(f"{module}.moe_align_block_size", lay_out, HookType.AROUND)
    HookRegistry.register(f"{module}._fused_moe_kernel_sequence", compute, HookType.AROUND)
    HookRegistry.register(f"{module}._use_moe_sum_reduce_torch_compile", compiles, HookType.AROUND)
    HookRegistry.register(f"{module}.moe_sum_reduce", add_up, HookType.AROUND)


def prepare(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """SGLang's `_prepare_fused_moe_run`."""
    global _prepares
    _prepares = True
    try:
        return original(*arguments, **named)
    finally:
        _prepares = False


def lay_out(original: Callable[..., Any], experts: torch.Tensor, block: int, count: int, *more: Any) -> Any:
    """SGLang's `moe_align_block_size`, without rows for experts of other ranks."""
    if not _prepares or not _leaves_out(experts):
        return original(experts, block, count, *more)
    return original(experts, block, count, ignore_invalid_expert=True)


def compute(
    original: Callable[..., Any], hidden: Any, w1: Any, w2: Any, weights: Any, experts: Any, *more: Any, **named: Any
) -> Any:
    """SGLang's `_fused_moe_kernel_sequence`, for rows that `lay_out` laid out.

    Raises:
        EngineError: the sum is not SGLang's own over the experts of a token.
    """
    global _experts
    if not _leaves_out(experts):
        return original(hidden, w1, w2, weights, experts, *more, **named)
    from sglang.srt.runtime_context import get_server_args

    for name in ("no_combine", "hooks"):
        if named.get(name):
            raise EngineError(f"rollout.engine.local_experts_only=true: SGLang's experts have {name}, expected false")
    if get_server_args().enable_fused_moe_sum_all_reduce:
        raise EngineError("rollout.engine.local_experts_only=true: not with enable_fused_moe_sum_all_reduce")
    _experts = experts
    try:
        return original(hidden, w1, w2, weights, experts, *more, **named)
    finally:
        _experts = None


def compiles(original: Callable[..., Any], *arguments: Any) -> Any:
    """SGLang's choice of a compiled sum for few tokens, which would read all rows."""
    return False if _experts is not None else original(*arguments)


def add_up(original: Callable[..., Any], rows: torch.Tensor, into: torch.Tensor, scale: float) -> None:
    """SGLang's `moe_sum_reduce`: (T, K, H) -> (T, H), times a factor."""
    if _experts is None:
        original(rows, into, scale)
        return
    # Triton is slow to import, and only engines need it here.
    from engine3d.platform.cuda.expert_sum_kernels import sum_local

    sum_local(rows, _experts, into, scale)


def _leaves_out(experts: torch.Tensor) -> bool:
    return experts.shape[1] >= _LEAST
