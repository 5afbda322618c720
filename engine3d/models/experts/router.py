"""Megatron-Core's router, with the losses and loads of `load_balance` in place of its own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    router_gating_linear,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine3d.layout import Layout
from engine3d.models.experts.load_balance import LoadBalance, RouterLosses
from engine3d.models.experts.routes import RouteFormat
from engine3d.models.experts.routing_replay import LayerReplay, RoutingReplay, decode
from engine3d.models.family import ModelSpec
from engine3d.models.rules import ExpertNumbering


class Router(TopKRouter):  # type: ignore[misc]
    """A router whose losses and loads are of an update's tokens, whatever the micro-batch that they are in.

    Megatron-Core's are means of a micro-batch, and expect a division by tokens that is not made here.
    """

    balance: LoadBalance | None = None
    sequences: Tensor | None = None
    """(b, s) of the micro-batch that is computed: the number of each position's sequence, -1 for padding."""
    rows: Tensor | None = None
    """(b, s) of this micro-batch: the row of each position in the tables of `RoutingReplay`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True  # it moves with an optimizer step that is applied: see TrainEngine.update

    def locate(self, positions: Tensor | None) -> None:
        """Take the positions that are computed next.

        Args:
            positions: (b, s) int32, their sequences; or int64, with their rows, as `routing_replay.encode` joins them.
        """
        self.sequences = self.rows = None
        if positions is not None and positions.dtype == torch.int64:
            self.rows, self.sequences = decode(positions)
        else:
            self.sequences = positions

    def gating(self, input: Tensor) -> Tensor:
        """[s, b, hidden] -> [s, b, E] logits."""
        of_gpu = input.is_cuda and input.dtype == self.weight.dtype == torch.bfloat16
        if of_gpu and self.bias is None and self.config.moe_router_dtype == "fp32":
            return wide_logits(input, self.weight)
        return super().gating(input)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, E] -> probabilities and bool routing, [s * b, E] each; the probabilities carry the layer's loss."""
        probabilities, routing = super().routing(logits)
        if self.balance is None or self.sequences is None or not self.balance.is_recording:
            return probabilities, routing
        flat = logits.view(-1, self.num_experts)

        def scores() -> tuple[Tensor, Tensor]:
            return compute_routing_scores_for_aux_loss(  # type: ignore[no-any-return]
                flat, self.topk, self.score_function, fused=self.config.moe_router_fusion
            )

        of_tokens = self.sequences.transpose(0, 1).reshape(-1)
        loss = self.balance.route(self.layer_number, flat, routing, of_tokens, scores)
        if loss is not None:
            probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)
        return probabilities, routing

    def is_aux_loss_enabled(self) -> bool:
        """False: Megatron-Core computes no loss itself."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do nothing: `balance` counts real tokens alone."""


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """A router's logits in float32, with a backward pass of GEMMs in bfloat16.

    Megatron-Core converts the factors of the gradient to float32, and rounds the gradient itself to TF32's ten bits.
    Here the gradient is two bfloat16 numbers, which add up to its first sixteen bits.

    Args:
        hidden: (..., hidden) bfloat16.
        weight: (E, hidden) bfloat16.

    Returns:
        (..., E) float32.
    """
    logits: Tensor = _WideLogits.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return logits


class _WideLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return router_gating_linear(hidden, weight, None, torch.float32)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        flat, experts = gradient.flatten(0, -2), len(weight)
        halves = flat.new_empty(len(flat), 2, experts, dtype=torch.bfloat16)
        halves[:, 0] = flat
        halves[:, 1] = flat - halves[:, 0]
        both = halves.flatten(1)
        of_hidden = both @ torch.cat((weight, weight))
        upper, lower = _wide_product(both.t(), hidden.flatten(0, -2)).chunk(2)
        return of_hidden.view_as(hidden), (upper + lower).to(weight.dtype)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Product of bfloat16 matrices, in float32."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def load_balance(model: Any, config: Any, spec: ModelSpec, layout: Layout) -> LoadBalance:
    """Build the load balancing of this rank's shard of a model with experts, of a TransformerConfig."""
    numbering = spec.expert_numbering(layout)
    return LoadBalance(
        [module for module in model.modules() if isinstance(module, Router)],
        RouterLosses.of(config),
        sparse=spec.sizes.sparse,
        experts=[numbering.hf(expert) for expert in range(spec.sizes.experts)],
        topk=config.moe_router_topk,
        biased=config.moe_router_enable_expert_bias,
        device=next(model.parameters()).device,
        # Groups that are used anyway: NCCL takes memory for each.
        model_group=parallel_state.get_intra_distributed_optimizer_instance_group(),
        shard_group=parallel_state.get_tensor_model_parallel_group()
        if config.context_parallel_size == 1
        else parallel_state.get_tensor_and_context_parallel_group(),
    )


def routing_replay(model: Any, routes: RouteFormat, numbering: ExpertNumbering) -> RoutingReplay:
    """Build the routing replay of this rank's shard of a model with experts.

    Args:
        model: whose routers read and write routes from now on, in passes that have any.
        routes: format of the complete model's routes.
        numbering: of its experts.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    replay = RoutingReplay(
        routes,
        sorted(router.layer_number - 1 for router in routers),
        [numbering.hf(expert) for expert in range(routes.experts)],
        device=next(model.parameters()).device,
        model_group=parallel_state.get_intra_distributed_optimizer_instance_group(),
    )
    for router in routers:
        router.router_replay = LayerReplay(replay, router)
    return replay
