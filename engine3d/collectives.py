"""Collective operations that cost nothing where there is nobody to talk to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import dist, torch

if TYPE_CHECKING:
    from torch import Tensor


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.all_reduce`, which even for a group of one rank makes a communicator, with buffers."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of all ranks, all of one shape, in order of rank."""
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    if len(gathered) == 1:
        return [tensor]
    dist.all_gather(gathered, tensor, group)
    return gathered
