"""Megatron-Core's layer of experts: with a router that knows sequences, and in one step where it can be."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from engine3d.models.experts.room import Room, RowsAhead
from engine3d.models.experts.routed_experts import routed_experts
from engine3d.models.experts.ways import Way, copying_way


class MoELayerOfSequences(MoELayer):  # type: ignore[misc]
    """A layer whose router is told the sequence of every position."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] -> the same, and no bias. `padding_mask`, [b, s], has `Router.sequences` in it."""
        self.router.sequences = padding_mask
        return super().forward(hidden_states, intermediate_tensors)  # type: ignore[no-any-return]


class MoELayerInOneStep(MoELayerOfSequences):
    """A layer whose experts can say what their weights are `together`; see `routed_experts`.

    Args:
        copies_timeout_s: where ranks copy tokens into each other's memory, limit of each wait for another rank.

    Attributes:
        room: for rows of its experts before their number is known, where the model makes it.
    """

    room: Room | None = None

    def __init__(self, *args: Any, copies_timeout_s: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies_timeout_s = copies_timeout_s

    @property
    def way(self) -> Way:
        """Between the ranks that share the experts."""
        if self.copies_timeout_s is None:
            return Way(self.ep_group)
        return copying_way(self.ep_group, self.copies_timeout_s)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """As above."""
        experts = self.experts
        first, last = (layer.together(hidden_states.dtype) for layer in (experts.linear_fc1, experts.linear_fc2))
        if first is None or last is None or intermediate_tensors is not None:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        self.router.sequences = padding_mask
        tokens, way = hidden_states.reshape(-1, hidden_states.shape[-1]), self.way
        gathered = way.gather_ahead(tokens.detach().contiguous())
        shared = self.shared_experts_compute(hidden_states)
        probabilities, routing = self.route(hidden_states)
        output = routed_experts(
            tokens,
            probabilities,
            routing,
            first,
            last,
            most=self.config.moe_router_topk,
            way=way,
            gathered=gathered,
            room=self.room,
        ).view(hidden_states.shape)
        return output if shared is None else output + shared, None


def make_room(model: Module, ahead: RowsAhead) -> None:
    """Have all layers of a model whose experts are one step make room before they know how many rows they have."""
    for layer in model.modules():
        if isinstance(layer, MoELayerInOneStep):
            layer.room = Room(ahead)
