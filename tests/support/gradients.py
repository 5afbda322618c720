"""Gradients of a rank's shard of a model, by the names of HuggingFace's tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine3d.models.files.weights import rank_parameters
from engine3d.models.rules import Box, TensorSlice


def gradients(engine: Any) -> list[tuple[TensorSlice, Tensor]]:
    """Gradients of the last update, summed over data-parallel ranks, each with its slice of a HuggingFace tensor."""
    for buffer in (
        buffer for chunk in engine.gradient_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    parameters: Any = rank_parameters(engine.weighted, engine.trained, engine.layout, engine.coordinates)
    return [
        (tensor_slice, parameter.main_grad[slices(tensor_slice.local_box)].clone())
        for local, parameter in parameters
        for tensor_slice in local.slices
        if not local.buffer
    ]


def slices(box: Box) -> tuple[slice, ...]:
    """Index of a box's elements."""
    return tuple(slice(*bounds) for bounds in box)
