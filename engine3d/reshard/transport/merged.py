"""Trainer's weights with their adapters added: memory next to the parameters, which each version is merged into."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from engine3d.models.rules import LocalParameter
from engine3d.platform import platform

if TYPE_CHECKING:
    from engine3d.models.lora.modules import Adapters


class MergedWeights:
    """Weights of one rank as an engine without adapters has them. The rank's own weights stay as they are.

    The merged weights lie in one buffer. All else is the rank's parameters themselves.

    Args:
        parameters: of the rank, each with its rule (`rank_parameters`).
        adapters: of the rank.

    Attributes:
        parameters: the same with merged memory in place of the weights that have adapters.
    """

    def __init__(self, parameters: Sequence[tuple[LocalParameter, torch.Tensor]], adapters: Adapters) -> None:
        self._adapters = adapters
        adapted = [tensor for _, tensor in parameters if adapters.adapts(tensor)]
        sizes = [prod(tensor.shape) for tensor in adapted]
        with platform.shareable_memory():
            memory = torch.zeros(sum(sizes), dtype=adapted[0].dtype, device=adapted[0].device)
        self._merged = {
            tensor: values.view(tensor.shape) for tensor, values in zip(adapted, memory.split(sizes), strict=True)
        }
        self.parameters = [(local, self._merged.get(tensor, tensor).detach()) for local, tensor in parameters]

    def merge(self) -> None:
        """Merge the current adapters."""
        for weight, merged in self._merged.items():
            merged.copy_(self._adapters.merged(weight))
