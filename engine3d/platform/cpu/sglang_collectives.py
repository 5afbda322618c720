"""Collective operations of SGLang's data parallel attention on a CPU, where it has them for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Register them in the place of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    HookRegistry.register(f"{group}.reduce_scatterv", _reduce_scatter, HookType.REPLACE)
    HookRegistry.register(f"{group}.reduce_scatter_tensor", _reduce_scatter_equal, HookType.REPLACE)
    HookRegistry.register(f"{group}.all_gather_into_tensor", _all_gather, HookType.REPLACE)


def _reduce_scatter(
    group: Any, whole: torch.Tensor, output: torch.Tensor | None = None, sizes: list[int] | None = None
) -> torch.Tensor:
    """SGLang's `GroupCoordinator.reduce_scatterv`, which is NCCL's alone."""
    total = whole.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    parts = total.split(sizes if sizes is not None else len(whole) // group.world_size)
    own = parts[group.rank_in_group]
    return own.contiguous() if output is None else output.copy_(own)


def _reduce_scatter_equal(group: Any, output: torch.Tensor, whole: torch.Tensor) -> None:
    """SGLang's `GroupCoordinator.reduce_scatter_tensor`, whose operator is there for GPUs alone."""
    _reduce_scatter(group, whole, output)


def _all_gather(group: Any, output: torch.Tensor, own: torch.Tensor) -> None:
    """SGLang's `GroupCoordinator.all_gather_into_tensor`, whose operator is there for GPUs alone."""
    torch.distributed.all_gather_into_tensor(output.view(-1), own.reshape(-1), group=group.device_group)
