"""Megatron-Core's router, with the losses and loads of `load_balance` in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
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

from engine3d.models.experts.load_balance import LoadBalance, RouterLosses


class Router(TopKRouter):  # type: ignore[misc]
    """A router whose losses and loads are of an update's tokens, whatever the micro-batch that they are in.

    Megatron-Core's are means of a micro-batch, and wait for a division by tokens that is not made here.
    """

    balance: LoadBalance | None = None
    sequences: Tensor | None = None
    """(b, s) of the micro-batch that is computed: the number of each position's sequence, -1 for padding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True  # it moves with an optimizer step that is made: see TrainEngine.update

    def gating(self, input: Tensor) -> Tensor:
        """[s, b, hidden] -> [s, b, E] logits."""
        of_gpu = input.is_cuda and input.dtype == self.weight.dtype == torch.bfloat16
        if of_gpu and self.bias is None and self.config.moe_router_dtype == "fp32":
            return wide_logits(input, self.weight)
        return super().gating(input)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, E] -> probabilities and bool routing, [s * b, E] each; the probabilities carry the layer's loss."""
        probabilities, routing = super().routing(logits)
        if self.balance is None or self.sequences is None or not self.balance.watches:
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
        """No: of what Megatron-Core would compute itself, there is none."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The logits as they are."""
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Nothing: `balance` counts, real tokens alone."""


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """A router's logits in float32, whose gradient goes back by products in bfloat16.

    Megatron-Core makes float32 of what is multiplied with the gradient, and rounds the gradient itself to TF32's ten
    bits on the way. Here that is two bfloat16 numbers, which add up to its first sixteen bits.

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
    """Of bfloat16 matrices, in float32."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def load_balance(model: Any, sparse: Sequence[bool]) -> LoadBalance:
    """Of this rank's part of a model with experts, by its TransformerConfig; `sparse` is that of all layers."""
    config = model.config
    return LoadBalance(
        [module for module in model.modules() if isinstance(module, Router)],
        RouterLosses.of(config),
        sparse=sparse,
        experts=config.num_moe_experts,
        most=config.moe_router_topk,
        device=next(model.parameters()).device,
        # Groups that are used anyway: for each that is, NCCL takes memory.
        everyone=parallel_state.get_intra_distributed_optimizer_instance_group(),
        shares=parallel_state.get_tensor_model_parallel_group(),
    )
