"""Memory that one rank of a model keeps as long as the model exists: weights, gradients, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec, weight_name
from engine3d.models.precision import joined_slices, scale_box
from engine3d.models.rules import Box, local_parameters
from engine3d.reshard.describe.source import buffer_rules, parameter_buffers, tied_stages, unpadded_elements
from engine3d.training.config import TrainConfig
from engine3d.training.host_state import most_on_device
from engine3d.training.optimizer import element_bytes

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """Bytes of a rank.

    Args:
        weights: in the dtype that the model computes in, padding included.
        gradients: the buffer that they are added up in.
        optimizer: this rank's shard of Adam's two moments, and of what a bf16 weight lacks to float32. The first update
            allocates it.
        offloaded: bytes of these in host memory: with an offloaded optimizer the moments, not the float32 weights.
        staged: bytes of these on the device while they are updated.
        dummy_gradients: placeholders that Transformer Engine hands autograd for gradients that it adds to their buffer
            itself: a tensor for each shape of a linear layer's weight.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    offloaded: int = 0
    staged: int = 0
    dummy_gradients: int = 0

    def __add__(self, other: ResidentBytes) -> ResidentBytes:
        return ResidentBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.offloaded + other.offloaded,
            max(self.staged, other.staged),  # one buffer is updated after the other
            self.dummy_gradients + other.dummy_gradients,
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.dummy_gradients

    @property
    def on_device(self) -> int:
        """Bytes that are not in host memory."""
        return self.total - self.offloaded


def quantised_bytes(spec: ModelSpec, layout: Layout, at: Coordinates, *, transformer_engine: bool = True) -> int:
    """Predict the memory of a rank's weights in fp8 next to its parameters (`reshard.transport.quantised`).

    Args:
        spec: the model.
        layout: must pass `check_shards`.
        at: the rank.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """
    boxes = [
        box
        for local in spec.local_parameters(layout, at, transformer_engine=transformer_engine)
        for name, box, _ in joined_slices(local.slices)
        if spec.hf_tensors[name].fp8
    ]
    return sum(_elements(box) + _FLOAT32 * _elements(scale_box(box)) for box in boxes)


def resident_by_rank(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinates,
    config: TrainConfig,
    *,
    trainable: bool = True,
    transformer_engine: bool = True,
) -> ResidentBytes:
    """Predict what the rank at `at` keeps.

    Megatron-Core's buffers are laid out as in `reshard.describe.source`. Its distributed optimizer cuts each evenly
    over the ranks that have the same one.

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype and optimizer.
        trainable: false for a model without gradients and optimizer.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """
    if config.lora is not None and trainable:
        return _with_adapters(spec, layout, at, config, config.lora, transformer_engine=transformer_engine)
    itemsize = ITEMSIZES[config.dtype]
    of_element = element_bytes(config)
    dense, experts = buffer_rules(spec.rules, layout)
    tied, resident = tied_stages(spec, layout), ResidentBytes()
    for rules, copies in ((dense, layout.dp * layout.cp), (experts, layout.edp)):
        if rules is None:
            continue
        listed = partial(
            local_parameters,
            rules,
            layout,
            at,
            transformer_engine=transformer_engine,
            expert_order=spec.expert_order,
        )
        local = listed(each_expert=False)
        parameters = [parameter for parameter in local if not parameter.buffer]
        others = sum(parameter.count * prod(parameter.shape) for parameter in local if parameter.buffer)
        elements = None if tied else unpadded_elements(parameters, copies)
        if elements is None:
            buffers = parameter_buffers(listed(), copies, tied=tied)
            elements = sum(buffer.elements for buffer in buffers)
        resident += ResidentBytes(weights=elements * itemsize + others * _FLOAT32)
        if trainable:
            owned = elements // copies
            moments = owned * of_element.moments
            resident += ResidentBytes(
                gradients=elements * of_element.gradient, optimizer=owned * of_element.master + moments
            )
            if config.optimizer.offload:
                largest = min(owned, max((prod(parameter.shape) for parameter in parameters), default=0))
                resident += ResidentBytes(
                    offloaded=moments, staged=most_on_device(moments, largest * of_element.moments)
                )
        if trainable and transformer_engine and not spec.adapters:
            linear = [
                parameter for parameter in parameters if ".linear_" in parameter.name and len(parameter.shape) == 2
            ]
            shapes = {
                parameter.shape for parameter in linear if ".experts." not in parameter.name
            }  # experts are multiplied without
            resident += ResidentBytes(dummy_gradients=sum(map(prod, shapes)) * itemsize)
    return replace(resident, staged=resident.offloaded) if config.optimizer.overlap_offload else resident


def merged_bytes(
    spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, *, transformer_engine: bool = True
) -> int:
    """Predict the memory of a rank's weights with their adapters next to its parameters (`reshard.transport.merged`).

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype and adapters; 0 without adapters.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """
    if config.lora is None:
        return 0
    adapters = AdapterSpec.of(spec, config.lora)
    options = {"transformer_engine": transformer_engine}
    adapted = {weight_name(local.name) for local in adapters.local_parameters(layout, at, **options)}
    merged = [local for local in spec.local_parameters(layout, at, **options) if local.name in adapted]
    return ITEMSIZES[config.dtype] * sum(prod(local.shape) for local in merged)


def _with_adapters(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinates,
    config: TrainConfig,
    lora: LoraConfig,
    *,
    transformer_engine: bool,
) -> ResidentBytes:
    """Predict the frozen model and its trained adapters."""
    model = spec.local_parameters(layout, at, transformer_engine=transformer_engine)
    weights = sum(prod(local.shape) * (_FLOAT32 if local.buffer else ITEMSIZES[config.dtype]) for local in model)
    adapters = resident_by_rank(
        AdapterSpec.of(spec, lora),
        layout,
        at,
        config.model_copy(update={"lora": None}),
        transformer_engine=transformer_engine,
    )
    return adapters + ResidentBytes(weights=weights)


def _elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)
