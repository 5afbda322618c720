"""What one rank of a model keeps as long as the model is there: weights, gradients, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import local_parameters
from engine3d.reshard.describe.source import buffer_rules, parameter_buffer, tied_stages
from engine3d.training.config import TrainConfig
from engine3d.training.host_state import most_on_device
from engine3d.training.optimizer import element_bytes

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a rank.

    Args:
        weights: in the dtype that the model computes in, padding included.
        gradients: the buffer that they are added up in.
        optimizer: this rank's part of Adam's two moments, and of what a bf16 weight lacks to float32. It is taken by
            the first update.
        away: of these, what is in host memory: with an offloaded optimizer the moments, not the float32 weights.
        staged: what the device has of that while it is updated.
        dummy_gradients: what Transformer Engine hands autograd in place of gradients that it adds to their buffer
            itself: a tensor for each shape of a linear layer's weight.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    away: int = 0
    staged: int = 0
    dummy_gradients: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.away + other.away,
            max(self.staged, other.staged),  # one buffer is updated after the other
            self.dummy_gradients + other.dummy_gradients,
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.dummy_gradients

    @property
    def on_device(self) -> int:
        """Of all that, what is not in host memory."""
        return self.total - self.away


def held_by_rank(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinates,
    config: TrainConfig,
    *,
    trainable: bool = True,
    transformer_engine: bool = True,
) -> Held:
    """What the rank at `at` keeps.

    Megatron-Core's buffers are laid out as in `reshard.source`; its distributed optimizer cuts each evenly over the
    ranks that have the same one.

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype and optimizer.
        trainable: false for a model without gradients and optimizer.
        transformer_engine: whether the model is built from Transformer Engine's layers.
    """
    itemsize = ITEMSIZES[config.dtype]
    of_element = element_bytes(config)
    dense, experts = buffer_rules(spec.rules, layout)
    found = Held()
    for rules, copies in ((dense, layout.dp * layout.cp), (experts, layout.edp)):
        if rules is None:
            continue
        local = local_parameters(
            rules, layout, at, transformer_engine=transformer_engine, expert_order=spec.expert_order
        )
        parameters = [each for each in local if not each.buffer]
        others = sum(prod(each.shape) for each in local if each.buffer)
        elements = parameter_buffer(parameters, copies, tied=tied_stages(spec, layout)).elements
        found += Held(weights=elements * itemsize + others * _FLOAT32)
        if trainable:
            own = elements // copies
            moments = own * of_element.moments
            found += Held(gradients=elements * of_element.gradient, optimizer=own * of_element.master + moments)
            if config.optimizer.offload:
                largest = min(own, max((prod(each.shape) for each in parameters), default=0))
                found += Held(away=moments, staged=most_on_device(moments, largest * of_element.moments))
        if trainable and transformer_engine:
            linear = [each for each in parameters if ".linear_" in each.name and len(each.shape) == 2]
            shapes = {each.shape for each in linear if ".experts." not in each.name}  # experts are multiplied without
            found += Held(dummy_gradients=sum(map(prod, shapes)) * itemsize)
    return replace(found, staged=found.away) if config.optimizer.overlap_offload else found
