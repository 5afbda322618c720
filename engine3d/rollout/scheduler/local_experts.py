"""Experts of other ranks left out of what a rank computes, where SGLang computes zeros for them.

With expert parallelism SGLang lays out a row for each of a token's experts, wherever that is: the kernel writes zeros
for those of other ranks, and the sum over a token's experts reads them. Here they get no rows, and the sum leaves them
out. That needs several of SGLang's functions to be used together, in the module of its Triton experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine3d.errors import EngineError
from engine3d.startup.lazy_imports import torch

LEAST_EXPERTS = 3
"""Fewest experts of a token: SGLang adds up fewer by other functions, or not at all."""

_prepares = False
"""True while SGLang lays out rows for the kernels below. Those of quantized weights are laid out by the same function.
"""
_experts: torch.Tensor | None = None
"""Experts of the current tokens: (T, K), -1 for those of other ranks. None where all rows are there, and once they are
added up.
"""


def register() -> None:
    """Hook SGLang's experts, in each of its processes, wherever a module has imported one of these functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
    for name, hook in HOOKS.items():
        HookRegistry.register(f"{module}.{name}", hook, HookType.AROUND)


def prepare(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """SGLang's `_prepare_fused_moe_run`."""
    global _prepares
    _prepares = True
    try:
        return original(*arguments, **named)
    finally:
        _prepares = False


def lay_out(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """SGLang's `moe_align_block_size`, without rows for experts of other ranks."""
    if not _prepares or not _leaves_out(arguments[0]):
        return original(*arguments, **named)
    return original(*arguments, **named | {"ignore_invalid_expert": True})


def compute(
    original: Callable[..., Any], hidden: Any, w1: Any, w2: Any, weights: Any, experts: Any, *more: Any, **named: Any
) -> Any:
    """SGLang's `_fused_moe_kernel_sequence`, for rows that `lay_out` laid out.

    Raises:
        EngineError: SGLang has read rows otherwise than by `add_up`, or not added them up.
    """
    global _experts
    if not _leaves_out(experts):
        return original(hidden, w1, w2, weights, experts, *more, **named)
    if named.get("hooks"):
        raise EngineError("rollout.engine.local_experts_only=true: SGLang's experts have hooks, expected none")
    _experts = experts
    try:
        result = original(hidden, w1, w2, weights, experts, *more, **named)
        if _experts is not None:
            raise EngineError("rollout.engine.local_experts_only=true: SGLang has not added up by moe_sum_reduce")
        return result
    finally:
        _experts = None


def compiles(original: Callable[..., Any], *arguments: Any) -> Any:
    """SGLang's choice of a compiled sum for few tokens, which would read all rows."""
    return False if _experts is not None else original(*arguments)


def add_up(original: Callable[..., Any], rows: torch.Tensor, into: torch.Tensor, scale: float) -> None:
    """SGLang's `moe_sum_reduce`: (T, K, H) -> (T, H), times a factor."""
    global _experts
    if _experts is None:
        original(rows, into, scale)
        return
    # Triton is slow to import, and only engines need it here.
    from engine3d.platform.cuda.kernels.expert_sum import sum_local

    sum_local(rows, _experts, into, scale)
    _experts = None


def _leaves_out(experts: torch.Tensor) -> bool:
    return experts.shape[1] >= LEAST_EXPERTS


HOOKS: Mapping[str, Callable[..., Any]] = {
    "_prepare_fused_moe_run": prepare,
    "moe_align_block_size": lay_out,
    "_fused_moe_kernel_sequence": compute,
    "_use_moe_sum_reduce_torch_compile": compiles,
    "moe_sum_reduce": add_up,
}
"""Hooks by the function that they wrap, in the module of SGLang's Triton experts."""
