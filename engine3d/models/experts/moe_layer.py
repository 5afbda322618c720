"""Megatron-Core's layer of experts with a router that knows sequences, and its fused form."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from engine3d.models.experts.fused_experts import fused_experts
from engine3d.models.experts.row_capacity import PredictedCapacity, RowCapacity
from engine3d.models.experts.token_dispatcher import TokenDispatcher, copy_engine_dispatcher


class SequenceMoELayer(MoELayer):  # type: ignore[misc]
    """A layer whose router knows the sequence of every position."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] -> the same, and no bias. `padding_mask`, [b, s], has the argument of `Router.locate`."""
        self.router.locate(padding_mask)
        return super().forward(hidden_states, intermediate_tensors)  # type: ignore[no-any-return]


class FusedMoELayer(SequenceMoELayer):
    """A layer whose experts have their weights as one tensor (`together`); see `fused_experts`.

    Args:
        copies_timeout_s: limit of each wait for another rank, where ranks copy tokens into each other's memory.

    Attributes:
        capacity: predicted capacity for rows of its experts, if the model predicts it.
    """

    capacity: RowCapacity | None = None

    def __init__(self, *args: Any, copies_timeout_s: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies_timeout_s = copies_timeout_s

    @property
    def dispatcher(self) -> TokenDispatcher:
        """Token dispatcher between the ranks that share the experts."""
        if self.copies_timeout_s is None:
            return TokenDispatcher(self.ep_group)
        return copy_engine_dispatcher(self.ep_group, self.copies_timeout_s)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] -> the same, and no bias, as `SequenceMoELayer.forward`."""
        experts = self.experts
        fc1, fc2 = (layer.together(hidden_states.dtype) for layer in (experts.linear_fc1, experts.linear_fc2))
        if fc1 is None or fc2 is None or intermediate_tensors is not None:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        self.router.locate(padding_mask)
        tokens, dispatcher = hidden_states.reshape(-1, hidden_states.shape[-1]), self.dispatcher
        gathered = dispatcher.gather_ahead(tokens.detach().contiguous())
        shared = self.shared_experts_compute(hidden_states)
        probabilities, routing = self.route(hidden_states)
        output = fused_experts(
            tokens,
            probabilities,
            routing,
            fc1,
            fc2,
            topk=self.config.moe_router_topk,
            dispatcher=dispatcher,
            gathered=gathered,
            capacity=self.capacity,
        ).view(hidden_states.shape)
        return output if shared is None else output + shared, None


def predict_capacity(model: Module, predicted: PredictedCapacity) -> None:
    """Make all fused layers of a model predict the capacity for their rows."""
    for layer in model.modules():
        if isinstance(layer, FusedMoELayer):
            layer.capacity = RowCapacity(predicted)
