"""What a rank takes while it computes: at most, and for how long as a call takes."""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Coordinates, Layout
from engine3d.memory.activations import (
    gradients_of_experts,
    gradients_of_layer,
    hidden_state,
    made_again_by_layer,
    made_by_experts,
    saved_by_layer,
    saved_for_balance,
)
from engine3d.models.family import ModelSpec
from engine3d.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes that a rank takes at the worst moment of a call.

    Args:
        activations: what layers have saved for the backward pass.
        logits: with what is held beside them: the hidden states, and the gradient of the output layer's weight.
        layer: the largest of what a single layer takes beside what is saved.
    """

    activations: int
    logits: int
    layer: int

    @property
    def peak(self) -> int:
        """The last layer and the logits are not there at the same time."""
        return self.activations + max(self.logits, self.layer)


def update_peak(spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, *, tokens: int) -> Working:
    """Of an update.

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype, recomputation, sequence parallelism.
        tokens: of the largest micro-batch.
    """
    itemsize, cut = ITEMSIZES[config.dtype], {"sequence_parallel": config.sequence_parallel}
    layers = spec.rules.stage_layers(layout, at.pp)
    how, room = cut | {"one_step": config.has_one_step_experts(spec.sizes, layout)}, _room(spec, layout, config)
    saved = [
        saved_by_layer(spec.sizes, layout, layer, itemsize, **how, fused_query_key=config.fused_query_key, room=room)
        for layer in layers
    ]
    if config.balances_experts:
        balance = [saved_for_balance(spec.sizes, layout, layer, **cut) for layer in layers]
        saved = [one + other for one, other in zip(saved, balance, strict=True)]
    gradients = [gradients_of_layer(spec.sizes, layout, layer, itemsize, **how, room=room) for layer in layers]
    under_way = layout.pp - at.pp  # micro-batches of a stage whose backward pass has not begun
    again = len(layers) if config.recompute_layers is None else min(config.recompute_layers, len(layers))
    if config.recompute != "full":
        again = 0
    kept = again * hidden_state(spec.sizes, layout, itemsize, **cut) + sum(saved[again:])
    if config.recompute == "selective":
        kept -= sum(made_again_by_layer(spec.sizes, layout, layer, itemsize, **how) for layer in layers)
    # A layer is computed again once all that was saved by those after it has been used.
    computed_again = max(map(sum, zip(saved[:again], gradients[:again], strict=True)), default=0.0)
    layer_peak = max(max(gradients[again:], default=0.0), computed_again - sum(saved[again:]))
    sparse = any(spec.sizes.is_sparse(layer) for layer in layers)
    of_experts = gradients_of_experts(spec.sizes, layout, itemsize) if sparse else 0
    return Working(
        activations=round(under_way * kept * tokens),
        logits=_head(spec, layout, at, config, tokens, backward=True),
        layer=round(layer_peak * tokens) + of_experts,
    )


def peer_memory(spec: ModelSpec, layout: Layout, config: TrainConfig, *, tokens: int) -> int:
    """Bytes into which other ranks copy tokens of experts, for as long as the model is there.

    Args:
        tokens: of the largest micro-batch of any call.
    """
    if not config.has_expert_copies(spec.sizes, layout):
        return 0
    from engine3d.models.experts.ways import CopyingWay  # imports torch

    of_rank = -(-tokens // layout.tp)  # experts in one step have their tokens cut over tp
    of_piece = -(-of_rank // CopyingWay.PIECES)
    return CopyingWay.TENSORS * layout.ep * of_piece * spec.sizes.hidden * ITEMSIZES[config.dtype]


def inference_peak(spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, *, tokens: int) -> Working:
    """Of log-probs or values without gradients; arguments as in `update_peak`."""
    itemsize, cut = ITEMSIZES[config.dtype], {"sequence_parallel": config.sequence_parallel}
    layers = spec.rules.stage_layers(layout, at.pp)
    one_step, room = config.has_one_step_experts(spec.sizes, layout), _room(spec, layout, config)
    saved = [
        saved_by_layer(spec.sizes, layout, layer, itemsize, **cut, one_step=one_step, room=room)
        + (made_by_experts(spec.sizes, layout, layer, itemsize, **cut, room=room) if one_step else 0)
        for layer in layers
    ]
    return Working(
        activations=0,
        logits=_head(spec, layout, at, config, tokens, backward=False),
        layer=round(max(saved, default=0.0) * tokens),
    )


def _room(spec: ModelSpec, layout: Layout, config: TrainConfig) -> float:
    """For rows of experts, over those that there are where ranks have as many each."""
    if not config.has_rows_ahead(spec.sizes, layout):
        return 1.0
    from engine3d.models.experts.room import SLACK  # imports torch

    return 1 + SLACK


def _head(spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, tokens: int, *, backward: bool) -> int:
    """The end of the last stage; the gradient of the logits takes their place."""
    if at.pp != layout.pp - 1 or spec.value_head:
        return 0
    itemsize = ITEMSIZES[config.dtype]
    width, hidden = spec.padded_vocabulary(layout) // layout.tp, spec.sizes.hidden
    together = tokens if config.logits_tokens is None else min(tokens, config.logits_tokens)
    weight_gradient = width * hidden if backward else 0
    return itemsize * (together * width + 2 * tokens * hidden + weight_gradient)
