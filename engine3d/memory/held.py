"""What one rank of a model keeps as long as the model is there: weights, gradients, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import local_parameters
from engine3d.reshard.source import buffer_rules, parameter_buffer, tied_stages
from engine3d.training.config import TrainConfig

_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a rank.

    Args:
        weights: in the dtype that the model computes in, padding included.
        gradients: the buffer that they are added up in.
        optimizer: this rank's part of Adam's two moments, and of what a bf16 weight lacks to float32. It is taken by
            the first update.
        masters: of these, float32 weights, which are on the device even where the rest waits in host memory.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.masters + other.masters,
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


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
    itemsize = getattr(torch, config.dtype).itemsize
    gradient, state, master = _bytes_of_an_element(config)
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
            found += Held(gradients=elements * gradient, optimizer=own * state, masters=own * master)
    return found


def _bytes_of_an_element(config: TrainConfig) -> tuple[int, int, int]:
    """Of a weight's gradient, of what the optimizer keeps for it, and of this a float32 weight."""
    if config.dtype == "float32":
        return _FLOAT32, 2 * _FLOAT32, 0
    if config.optimizer.precision_aware:
        # Transformer Engine keeps the 16 bits by which a float32 weight differs from the bf16 one.
        return _BFLOAT16, 3 * _BFLOAT16, 0
    return _FLOAT32, 3 * _FLOAT32, _FLOAT32
