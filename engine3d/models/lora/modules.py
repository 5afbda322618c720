"""Adapters next to the linear layers of a rank's shard of a Megatron-Core model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Module, Parameter

from engine3d.collectives import all_reduce
from engine3d.layout import Coordinates, Layout
from engine3d.models.lora.peft_files import PeftTensors
from engine3d.models.lora.spec import A, AdapterSpec, B, module_name
from engine3d.models.rules import Box, LocalParameter


class Adapters:
    """The adapters of a rank's shard of a model, with the model frozen.

    A fused linear layer, such as that of queries, keys and values, has one A with the rows of each adapter one after
    another, and one B with the rows of its weight.

    Args:
        model: `build_model`'s.
        spec: of the adapters.
        layout: of the model.
        coordinates: of this rank.
        seed: of A: every layout has the same values.
        start: a directory of PEFT with their values; None for new ones.

    Attributes:
        enabled: True if they add to the outputs of their layers.
    """

    def __init__(
        self,
        model: Module,
        spec: AdapterSpec,
        layout: Layout,
        coordinates: Coordinates,
        *,
        seed: int,
        start: Path | None = None,
    ) -> None:
        self.enabled = True
        self._scale = spec.lora.scale
        model.requires_grad_(False)
        modules = dict(model.named_modules())
        for module in modules.values():
            if isinstance(module, LanguageModelEmbedding):
                module.register_forward_hook(_require_gradient)
        parameters = spec.local_parameters(layout, coordinates, transformer_engine=False)
        by_name = {local.name: local for local in parameters}
        stored = None if start is None else PeftTensors(start)
        self._layers: list[_AdaptedLinear] = []
        for first in parameters:
            module, _, kind = first.name.rpartition(".")
            if kind == A:
                linear: Any = modules[module]
                second = by_name[f"{module}.{B}"]
                self._layers.append(_AdaptedLinear(self, linear, first, second))
                if stored is None:
                    _initialise(linear.lora_A, first, spec, seed)
                else:
                    _read(linear.lora_A, first, stored)
                    _read(linear.lora_B, second, stored)
        self._by_weight = {layer.linear.weight: layer for layer in self._layers}

    @property
    def scale(self) -> float:
        """Factor of their outputs."""
        return self._scale

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the model alone within the block."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def reduce_gradients(self) -> None:
        """Sum gradients of complete tensors over the ranks that computed them from parts of the sequence or the sum."""
        by_group: dict[Any, list[Tensor]] = {}
        for layer in self._layers:
            if layer.partial is not None:
                by_group.setdefault(layer.group, []).append(layer.partial.main_grad)
        for group, gradients in by_group.items():
            joined = _flatten_dense_tensors(gradients)
            all_reduce(joined, dist.ReduceOp.SUM, group)
            for gradient, reduced in zip(gradients, _unflatten_dense_tensors(joined, gradients), strict=True):
                gradient.copy_(reduced)

    def adapts(self, weight: Tensor) -> bool:
        """True of a weight of the model that has an adapter."""
        return weight in self._by_weight

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, W + alpha / rank * B A, computed in float32; without one the weight."""
        layer = self._by_weight.get(weight)
        if layer is None:
            return weight.detach()
        return (weight.detach().float() + self._scale * layer.product()).to(weight.dtype)


class _AdaptedLinear:
    """A linear layer with its adapter.

    Attributes:
        linear: the layer.
        group: ranks that the layer is cut over.
        partial: the complete tensor of which each rank's gradient is a summand; None where it has the sum.
    """

    def __init__(self, adapters: Adapters, linear: Any, first: LocalParameter, second: LocalParameter) -> None:
        self._adapters, self.linear = adapters, linear
        self.group = linear.tp_group
        self._columns = isinstance(linear, ColumnParallelLinear)
        # The dispatcher of tokens gathers inputs and sums outputs of experts, as it does around the layer.
        self._split = self.group.size() > 1 and not linear.explicit_expert_comm
        self._sequence = bool(linear.sequence_parallel)
        weight = linear.weight
        for name, local, is_cut in (("lora_A", first, not self._columns), ("lora_B", second, self._columns)):
            parameter = Parameter(torch.zeros(local.shape, dtype=weight.dtype, device=weight.device))
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            # By it Megatron-Core counts a tensor once in the norm of gradients.
            parameter.tensor_model_parallel = is_cut or self.group.size() == 1  # type: ignore[attr-defined]
            parameter.partition_dim = (0 if self._columns else 1) if is_cut else -1  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
            linear.register_parameter(name, parameter)
        sums = self.group.size() > 1 and (self._sequence or linear.explicit_expert_comm)
        self.partial: Any = (linear.lora_A if self._columns else linear.lora_B) if sums else None
        # Without it where all rows belong to one adapter, as they always do where inputs are cut.
        owners = _owners(first, second)
        self._owners = owners.to(weight) if owners.shape[1] > 1 or not bool(owners.all()) else None
        linear.register_forward_hook(self._add)

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        """Add the adapter's output, in the parallel state of the layer's."""
        if not self._adapters.enabled:
            return None
        latent = F.linear(inputs[0], linear.lora_A)
        if self._split and self._columns:
            if self._sequence:
                latent = gather_from_sequence_parallel_region(latent, group=self.group)
            else:
                latent = copy_to_tensor_model_parallel_region(latent, group=self.group)
        elif self._split:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence
                else reduce_from_tensor_model_parallel_region
            )
            latent = reduce(latent, group=self.group)
        return outputs[0] + self._adapters.scale * F.linear(latent, self._b()), outputs[1]

    def _b(self) -> Tensor:
        """B, (out, adapters * rank): each row has its elements in the columns of its adapter."""
        second: Tensor = self.linear.lora_B
        if self._owners is None:
            return second
        return (second[:, None, :] * self._owners[:, :, None]).flatten(1)

    def product(self) -> Tensor:
        """B A in float32, of the weight's shape."""
        return self._b().detach().float() @ self.linear.lora_A.detach().float()


def _require_gradient(embedding: Module, inputs: Any, output: Tensor) -> None:
    """Require a gradient of the first layer's input: autograd enters layers that are computed again by that alone."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _owners(first: LocalParameter, second: LocalParameter) -> Tensor:
    """(rows of B, adapters): 1 where the row belongs to the adapter."""
    order = {module_name(region.hf_name): number for number, region in enumerate(first.slices)}
    owners = torch.zeros(second.shape[0], len(order))
    for region in second.slices:
        start, stop = region.local_box[0]
        owners[start:stop, order[module_name(region.hf_name)]] = 1
    return owners


def _initialise(parameter: Tensor, local: LocalParameter, spec: AdapterSpec, seed: int) -> None:
    """Fill A as PEFT does: uniform within 1 / sqrt(in) (Kaiming uniform with a = sqrt(5))."""
    with torch.no_grad():
        for region in local.slices:
            shape = spec.hf_shape(region.hf_name)
            # torch's CPU generator takes 32 bits of a seed.
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {region.hf_name}".encode()))
            bound = 1 / sqrt(shape[1])
            full = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            parameter[_index(region.local_box)].copy_(full[_index(region.hf_box)])


def _read(parameter: Tensor, local: LocalParameter, stored: PeftTensors) -> None:
    with torch.no_grad():
        for region in local.slices:
            parameter[_index(region.local_box)].copy_(stored.read(region.hf_name, region.hf_box))


def _index(box: Box) -> Sequence[slice]:
    return tuple(slice(start, stop) for start, stop in box)
