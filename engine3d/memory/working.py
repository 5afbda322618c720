"""Memory that a rank takes during a call, at its peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Coordinates, Layout
from engine3d.memory.activations import (
    gradients_of_experts,
    gradients_of_layer,
    gradients_of_ring,
    hidden_state,
    made_again_by_layer,
    made_by_experts,
    made_by_ring,
    saved_by_attention,
    saved_by_layer,
    saved_for_balance,
)
from engine3d.models.family import ModelSpec
from engine3d.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class WorkingBytes:
    """Bytes that a rank takes at the worst moment of a call.

    Args:
        activations: what layers have saved for the backward pass.
        logits: with what is live next to them: the hidden states, and the gradient of the output layer's weight.
        layer: the most that a single layer takes next to what is saved.
    """

    activations: int
    logits: int
    layer: int

    @property
    def peak(self) -> int:
        """The last layer and the logits are not there at the same time."""
        return self.activations + max(self.logits, self.layer)


def update_peak(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinates,
    config: TrainConfig,
    *,
    tokens: int,
    micro_batches: int | None = None,
) -> WorkingBytes:
    """Predict the peak of an update.

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype, recomputation, sequence parallelism.
        tokens: of the largest micro-batch. The ranks of a context-parallel group have an equal share of them each, of
            split sequences, which need more than complete ones.
        micro_batches: of an update, if that is known: no more are in flight on a pipeline stage.
    """
    rank_tokens = -(-tokens // layout.cp)
    by_kinds: dict[tuple[tuple[bool, bool], ...], _ChunkBytes] = {}
    chunks = []
    for layers in spec.rules.rank_layers(layout, at.pp):
        kinds = tuple((spec.sizes.is_sparse(layer), spec.sizes.is_linear(layer)) for layer in layers)
        if kinds not in by_kinds:
            by_kinds[kinds] = _chunk_bytes(spec, layout, layers, config)
        chunks.append(by_kinds[kinds])
    most = math.inf if micro_batches is None else micro_batches
    kept = max(
        sum(min(count, most) * chunk.kept for count, chunk in zip(moment, chunks, strict=True))
        for moment in layout.in_flight(at.pp)
    )
    has_experts = any(sparse for kinds in by_kinds for sparse, _ in kinds)
    of_experts = 0
    if has_experts and config.lora is None:  # which freezes them
        of_experts = gradients_of_experts(spec.sizes, layout, ITEMSIZES[config.dtype])
    head = _head(spec, layout, at, config, rank_tokens, backward=True)
    return WorkingBytes(
        activations=round(kept * rank_tokens),
        logits=head + (_multi_token(spec, layout, at, config, rank_tokens) if spec.mtp else 0),
        layer=round(max(chunk.layer_peak for chunk in chunks) * rank_tokens) + of_experts,
    )


@dataclass(frozen=True, slots=True)
class _ChunkBytes:
    """Bytes a token of a model chunk.

    Args:
        kept: from the forward pass of a micro-batch until its backward pass.
        layer_peak: the most that a single layer takes next to that.
    """

    kept: float
    layer_peak: float


def _chunk_bytes(spec: ModelSpec, layout: Layout, layers: Sequence[int], config: TrainConfig) -> _ChunkBytes:
    sizes = spec.sizes
    itemsize, cut = ITEMSIZES[config.dtype], {"sequence_parallel": config.sequence_parallel}
    how = cut | {"fused_experts": config.has_fused_experts(sizes, layout)}
    capacity, query_key = _capacity_factor(spec, layout, config), {"fused_query_key": config.fused_query_key}
    of_ring, in_ring = gradients_of_ring(sizes, layout, itemsize), made_by_ring(sizes, layout, itemsize)
    saved_by_kind: dict[tuple[bool, bool], float] = {}
    gradients_by_kind: dict[tuple[bool, bool], float] = {}
    kinds = [(sizes.is_sparse(layer), sizes.is_linear(layer)) for layer in layers]
    alike = dict(zip(kinds, layers, strict=True))
    for kind, layer in alike.items():
        saved_bytes = saved_by_layer(sizes, layout, layer, itemsize, **how, **query_key, capacity=capacity)
        balance = saved_for_balance(sizes, layout, layer, **cut) if config.balances_experts else 0.0
        saved_by_kind[kind] = saved_bytes + balance
        of_layer = gradients_of_layer(sizes, layout, layer, itemsize, **how, capacity=capacity)
        gradients_by_kind[kind] = max(of_ring, of_layer)
    saved, gradients = [saved_by_kind[kind] for kind in kinds], [gradients_by_kind[kind] for kind in kinds]
    again = len(layers) if config.recompute_layers is None else min(config.recompute_layers, len(layers))
    if config.recompute != "full":
        again = 0
    kept = again * hidden_state(sizes, layout, itemsize, **cut) + sum(saved[again:])
    if config.recompute == "selective":
        again_by_kind = {
            kind: made_again_by_layer(sizes, layout, layer, itemsize, **how) for kind, layer in alike.items()
        }
        kept -= sum(again_by_kind[kind] for kind in kinds)
    # A layer is computed again once all that was saved by those after it has been used.
    computed_again = max(map(sum, zip(saved[:again], gradients[:again], strict=True)), default=0.0)
    if again:
        attention = saved_by_attention(sizes, layout, itemsize, **cut, **query_key)
        computed_again = max(computed_again, attention + in_ring)
    # In the forward pass the last layer's attention is at work before its MLP has saved anything.
    last = saved[-1] - saved_by_attention(sizes, layout, itemsize, **cut, **query_key) if again < len(layers) else 0.0
    layer_peak = max(max(gradients[again:], default=0.0), computed_again - sum(saved[again:]), in_ring - last)
    return _ChunkBytes(kept, layer_peak)


def peer_memory(spec: ModelSpec, layout: Layout, config: TrainConfig, *, tokens: int) -> int:
    """Bytes into which other ranks copy tokens of experts, for as long as the model is there.

    Args:
        tokens: of the largest micro-batch of any call.
    """
    if not config.has_copy_engine_dispatcher(spec.sizes, layout):
        return 0
    from engine3d.models.experts.token_dispatcher import CopyEngineDispatcher  # imports torch

    rank_tokens = -(-tokens // (layout.cp * layout.tp))  # fused experts have their tokens cut over tp
    chunk_tokens = -(-rank_tokens // CopyEngineDispatcher.CHUNKS)
    return CopyEngineDispatcher.TENSORS * layout.ep * chunk_tokens * spec.sizes.hidden * ITEMSIZES[config.dtype]


def inference_peak(
    spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, *, tokens: int
) -> WorkingBytes:
    """Predict the peak of log-probs or values without gradients. Arguments are those of `update_peak`."""
    itemsize, cut = ITEMSIZES[config.dtype], {"sequence_parallel": config.sequence_parallel}
    rank_tokens = -(-tokens // layout.cp)
    layers = [layer for chunk in spec.rules.rank_layers(layout, at.pp) for layer in chunk]
    fused_experts, capacity = config.has_fused_experts(spec.sizes, layout), _capacity_factor(spec, layout, config)
    saved = [
        saved_by_layer(spec.sizes, layout, layer, itemsize, **cut, fused_experts=fused_experts, capacity=capacity)
        + (made_by_experts(spec.sizes, layout, layer, itemsize, **cut, capacity=capacity) if fused_experts else 0)
        for layer in layers
    ]
    ring = saved_by_attention(spec.sizes, layout, itemsize, **cut) + made_by_ring(spec.sizes, layout, itemsize)
    return WorkingBytes(
        activations=0,
        logits=_head(spec, layout, at, config, rank_tokens, backward=False),
        layer=round(max([ring, *saved]) * rank_tokens),
    )


def _capacity_factor(spec: ModelSpec, layout: Layout, config: TrainConfig) -> float:
    """Capacity for rows of experts over the rows of an even load."""
    if not config.has_predicted_capacity(spec.sizes, layout):
        return 1.0
    from engine3d.models.experts.row_capacity import SLACK  # imports torch

    return 1 + SLACK


def _multi_token(spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, tokens: int) -> int:
    """Bytes of a layer for multi-token prediction, whose passes are done while the model's logits wait."""
    sizes, itemsize, cut = spec.sizes, ITEMSIZES[config.dtype], {"sequence_parallel": config.sequence_parallel}
    how = cut | {"fused_experts": config.has_fused_experts(sizes, layout)}
    of_layer = saved_by_layer(sizes, layout, sizes.layers - 1, itemsize, **how, fused_query_key=False, capacity=1.0)
    of_layer += gradients_of_layer(sizes, layout, sizes.layers - 1, itemsize, **how, capacity=1.0)
    states = 4 * hidden_state(sizes, layout, itemsize, **cut)  # normed, and joined
    head = _head(spec, layout, at, config, tokens, backward=False)
    return round((of_layer + states) * tokens) + head + gradients_of_experts(sizes, layout, itemsize)


def _head(spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, tokens: int, *, backward: bool) -> int:
    """Bytes of the last stage's head on a rank's tokens. The gradient of the logits overwrites them."""
    if at.pp != layout.pp - 1 or spec.value_head:
        return 0
    itemsize = ITEMSIZES[config.dtype]
    width, hidden = spec.padded_vocabulary(layout) // layout.tp, spec.sizes.hidden
    together = tokens if config.logits_tokens is None else min(tokens, config.logits_tokens)
    weight_gradient = width * hidden if backward and config.lora is None else 0
    return itemsize * (together * width + 2 * tokens * hidden + weight_gradient)
