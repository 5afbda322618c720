"""Trainer's fp8 weights: memory next to its parameters, which each version is quantised into before it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine3d.models.precision import (
    FP8_DTYPE,
    joined_slices,
    joined_values,
    matrices_of,
    quantise,
    quantiser,
    scale_box,
    scale_name,
)
from engine3d.models.rules import Box, HFTensor, LocalParameter, TensorSlice
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Buffer, Holding, Location, RankShards
from engine3d.reshard.describe.source import model_shards
from engine3d.reshard.describe.strided import contiguous_strides


@dataclass(frozen=True, slots=True)
class _QuantisedBox:
    """A box of a tensor on the rank whose slices must be joined, and its memory.

    Args:
        parameter: that it is quantised from.
        box: of the HuggingFace tensor.
        slices: of the parameter that make up the box.
        values, scales: in which it is quantised.
    """

    parameter: torch.Tensor
    box: Box
    slices: tuple[TensorSlice, ...]
    values: torch.Tensor
    scales: torch.Tensor


class QuantisedWeights:
    """Weights of one rank as an engine in fp8 has them.

    The values of all quantised tensors lie in one buffer and their scales in another. All else is the rank's parameters
    themselves.

    Args:
        parameters: of the rank, each with its rule (`rank_parameters`). Their layout passes `check_shards`.
        tensors: of the HuggingFace model, by name.
        name: how errors call the rank.
        rank: its number among the sources.
        location: of its memory.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[LocalParameter, torch.Tensor]],
        tensors: Mapping[str, HFTensor],
        name: str,
        rank: int,
        location: Location,
    ) -> None:
        kept = [(local, tensor) for local, tensor in parameters if not _is_quantised(local, tensors)]
        quantised = [
            (hf_name, tensor, box, slices)
            for local, tensor in parameters
            if _is_quantised(local, tensors)
            for hf_name, box, slices in joined_slices(local.slices)
        ]
        shards, storages = model_shards(kept, name, rank, location)
        first = len(shards.buffers)
        device = parameters[0][1].device
        sizes = [(_sizes(box), _sizes(scale_box(box))) for _, _, box, _ in quantised]
        totals = [sum(prod(size[kind]) for size in sizes) for kind in (0, 1)]
        with platform.shareable_memory():
            memory = [
                torch.zeros(total, dtype=dtype, device=device)
                for total, dtype in zip(totals, (getattr(torch, FP8_DTYPE), torch.float32), strict=True)
            ]
        holdings: list[Holding] = []
        self._joined: list[_QuantisedBox] = []
        matrices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        offsets = [0, 0]
        for (hf_name, tensor, box, slices), size in zip(quantised, sizes, strict=True):
            views = []
            for kind, (tensor_name, tensor_box) in enumerate(((hf_name, box), (scale_name(hf_name), scale_box(box)))):
                start, stop = offsets[kind], offsets[kind] + prod(size[kind])
                holdings.append(Holding(tensor_name, tensor_box, first + kind, start, contiguous_strides(size[kind])))
                views.append(memory[kind][start:stop].view(size[kind]))
                offsets[kind] = stop
            if (views_of := matrices_of(tensor, box, slices, *views)) is None:
                self._joined.append(_QuantisedBox(tensor, box, slices, *views))
            else:
                matrices += views_of
        self._quantise = quantiser(matrices)
        buffers = (
            Buffer("fp8 values", FP8_DTYPE, (totals[0],)),
            Buffer("fp8 scales", "float32", (totals[1],)),
        )
        self.shards = RankShards(
            name, rank, location, (*shards.buffers, *buffers), (*shards.holdings, *holdings), owner=shards.owner
        )
        self.storages = [*storages, *(buffer.untyped_storage() for buffer in memory)]

    def quantise(self) -> None:
        """Quantise the current parameters."""
        with torch.no_grad():
            self._quantise()
            for box in self._joined:
                values, scales = quantise(joined_values(box.parameter, box.box, box.slices))
                box.values.copy_(values)
                box.scales.copy_(scales)


def _is_quantised(local: LocalParameter, tensors: Mapping[str, HFTensor]) -> bool:
    return any(tensors[tensor_slice.hf_name].fp8 for tensor_slice in local.slices)


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
