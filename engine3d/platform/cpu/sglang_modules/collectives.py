"""Collective operations of SGLang's data parallel attention on a CPU, where it has them for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Register them in place of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    HookRegistry.register(f"{group}.reduce_scatterv", _reduce_scatter, HookType.REPLACE)
    HookRegistry.register(f"{group}.reduce_scatter_tensor", _reduce_scatter_equal, HookType.REPLACE)
    HookRegistry.register(f"{group}.all_gather_into_tensor", _all_gather, HookType.REPLACE)


def _reduce_scatter(
    group: Any, tensor: torch.Tensor, output: torch.Tensor | None = None, sizes: list[int] | None = None
) -> torch.Tensor:
    """SGLang's `GroupCoordinator.reduce_scatterv`, which is NCCL's alone."""
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    blocks = total.split(sizes if sizes is not None else len(tensor) // group.world_size)
    block = blocks[group.rank_in_group]
    return block.contiguous() if output is None else output.copy_(block)


def _reduce_scatter_equal(group: Any, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """SGLang's `GroupCoordinator.reduce_scatter_tensor`, whose operator is there for GPUs alone."""
    _reduce_scatter(group, tensor, output)


def _all_gather(group: Any, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """SGLang's `GroupCoordinator.all_gather_into_tensor`, whose operator is there for GPUs alone."""
    torch.distributed.all_gather_into_tensor(output.view(-1), tensor.reshape(-1), group=group.device_group)
