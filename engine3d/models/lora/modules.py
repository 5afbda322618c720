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
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Module

from engine3d.collectives import all_reduce
from engine3d.layout import Coordinates, Layout
from engine3d.models.lora.linears import AdaptedExperts, AdaptedLinear
from engine3d.models.lora.peft_files import PeftTensors
from engine3d.models.lora.spec import A, AdapterSpec, B
from engine3d.models.rules import Box, LocalParameter
from engine3d.platform import platform


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
        by_layer: dict[str, dict[str, list[LocalParameter]]] = {}
        for local in spec.local_parameters(layout, coordinates, transformer_engine=platform.has_transformer_engine):
            path, _, last = local.name.rpartition(".")
            by_layer.setdefault(path, {A: [], B: []})[last[: len(A)]].append(local)
        self._layers: list[AdaptedLinear] = []
        stored = None if start is None else PeftTensors(start)
        for path, local_tensors in by_layer.items():
            first, second = local_tensors[A], local_tensors[B]
            kind = AdaptedLinear if first[0].name.endswith(A) else AdaptedExperts
            layer = kind(self, modules[path], first, second)
            self._layers.append(layer)
            for (a, b), local_a, local_b in zip(layer.pairs, first, second, strict=True):
                if stored is None:
                    _initialise(a, local_a, spec, seed)
                else:
                    _read(a, local_a, stored)
                    _read(b, local_b, stored)
        self._by_weight = {
            weight: (layer, number) for layer in self._layers for number, weight in enumerate(layer.weights)
        }

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
            partial: list[Any] = layer.partial
            by_group.setdefault(layer.group, []).extend(tensor.main_grad for tensor in partial)
        for group, gradients in by_group.items():
            if not gradients:
                continue
            joined = _flatten_dense_tensors(gradients)
            all_reduce(joined, dist.ReduceOp.SUM, group)
            for gradient, reduced in zip(gradients, _unflatten_dense_tensors(joined, gradients), strict=True):
                gradient.copy_(reduced)

    def adapts(self, weight: Tensor) -> bool:
        """True if a weight of the model has an adapter."""
        return weight in self._by_weight

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, W + alpha / rank * B A, computed in float32; without one the weight."""
        if weight not in self._by_weight:
            return weight.detach()
        layer, number = self._by_weight[weight]
        return (weight.detach().float() + self._scale * layer.product(number)).to(weight.dtype)


def _require_gradient(embedding: Module, inputs: Any, output: Tensor) -> None:
    """Require a gradient of the first layer's input: autograd enters layers that are computed again by that alone."""
    if torch.is_grad_enabled():
        output.requires_grad_(True)


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
