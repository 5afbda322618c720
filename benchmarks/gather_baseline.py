"""Gathering baseline of reshard.py: the path of other systems from Megatron-Core to SGLang.

Every full tensor is gathered on every trainer's rank over its model-parallel groups, converted to HuggingFace tensors,
and handed over in buckets through SGLang's `update_weights_from_tensor`, whose loader cuts each rank's part out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist

from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import LocalParameter
from engine3d.platform import platform


class GatherBaseline:
    """One trainer's rank of the strategy.

    Args:
        parameters: of the rank, each with what its rule says of it.
        spec: the model.
        layout: how it is cut.
        coordinates: of this rank.
    """

    def __init__(
        self,
        parameters: list[tuple[LocalParameter, torch.Tensor]],
        spec: ModelSpec,
        layout: Layout,
        coordinates: Coordinates,
    ) -> None:
        self._spec, self._layout, self._here = spec, layout, coordinates
        self._tensors = {local.name: tensor for local, tensor in parameters}
        self._device, self._dtype = parameters[0][1].device, parameters[0][1].dtype
        self._of_rank: dict[Coordinates, list[LocalParameter]] = {}

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The whole model as HuggingFace tensors, in buckets of about so many bytes. All ranks iterate together."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in self._gathered():
            bucket.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
            if size >= nbytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        from megatron.core import parallel_state

        stages = parallel_state.get_pipeline_model_parallel_group()
        for stage in range(self._layout.pp):
            for index, local in enumerate(self._parameters(stage, self._here)):
                if stage > 0 and local.name == "output_layer.weight" and self._spec.sizes.tied:
                    continue  # the embedding of the first stage once more
                mine = self._tensors[local.name] if stage == self._here.pp else self._empty(local)
                if self._layout.pp > 1:
                    dist.broadcast(mine, dist.get_global_rank(stages, stage), group=stages)
                yield from self._full(stage, index, local, mine)

    def _empty(self, local: LocalParameter) -> torch.Tensor:
        dtype = torch.float32 if local.buffer else self._dtype
        return torch.empty(local.shape, dtype=dtype, device=self._device)

    def _parameters(self, stage: int, coordinates: Coordinates) -> list[LocalParameter]:
        coordinates = replace(coordinates, pp=stage)
        if coordinates not in self._of_rank:
            self._of_rank[coordinates] = self._spec.local_parameters(
                self._layout, coordinates, transformer_engine=platform.has_transformer_engine
            )
        return self._of_rank[coordinates]

    def _full(
        self, stage: int, index: int, local: LocalParameter, mine: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one parameter over the groups that cut it, and put its HuggingFace tensors together."""
        from megatron.core import parallel_state

        shards = [(self._here, mine)]
        if ".experts." in local.name:
            cuts = [
                ("etp", self._layout.etp, parallel_state.get_expert_tensor_parallel_group),
                ("ep", self._layout.ep, parallel_state.get_expert_model_parallel_group),
            ]
        else:
            cuts = [("tp", self._layout.tp, parallel_state.get_tensor_model_parallel_group)]
        elements = sum(
            prod(self._spec.hf_shape(name)) for name in {tensor_slice.hf_name for tensor_slice in local.slices}
        )
        if ".experts." not in local.name and elements <= prod(local.shape):
            cuts = []  # every rank has all of it
        for field, size, group in cuts:
            if size == 1:
                continue
            gathered: list[tuple[Coordinates, torch.Tensor]] = []
            for coordinates, tensor in shards:
                outputs = [torch.empty_like(tensor) for _ in range(size)]
                dist.all_gather(outputs, tensor.contiguous(), group=group())
                gathered += [(replace(coordinates, **{field: number}), output) for number, output in enumerate(outputs)]
            shards = gathered
        full: dict[str, torch.Tensor] = {}
        for coordinates, tensor in shards:
            for tensor_slice in self._parameters(stage, coordinates)[index].slices:
                if tensor_slice.hf_name not in full:
                    shape = self._spec.hf_shape(tensor_slice.hf_name)
                    full[tensor_slice.hf_name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                target = full[tensor_slice.hf_name][tuple(slice(*edges) for edges in tensor_slice.hf_box)]
                target.copy_(tensor[tuple(slice(*edges) for edges in tensor_slice.local_box)])
        yield from full.items()


def serialized(bucket: list[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    """A bucket as SGLang takes it from another process, and the memory that has to live until it has been loaded."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if bucket[0][1].is_cuda:
        monkey_patch_torch_reductions()  # so that the engine finds the GPU under whatever number it has there
    flattened = FlattenedTensorBucket(named_tensors=bucket)
    memory = flattened.get_flattened_tensor()
    payload = {"flattened_tensor": memory, "metadata": flattened.get_metadata()}
    return MultiprocessingSerializer.serialize(payload, output_str=True), memory
