"""Bytes that a rank sends while a model is trained, from sizes alone.

Collectives of n ranks count as rings: each rank sends (n-1)/n of the complete tensor for an all-gather or a
reduce-scatter, and of its own tensor for an all-to-all with even splits. Hidden states and the scores of experts count;
sums of a few numbers a token, counts and norms do not. Sequence parallelism is on where tp is above 1.

With T tokens of a micro-batch on a context-parallel rank, t = T / tp, hidden size h, b bytes an element, k experts a
token, in each layer of an update:

    tp   (tp-1)/tp T b (5h + 5h): attention, and a dense MLP or a shared expert. All-gather and reduce-scatter forward
         and backward, and the inputs of the first linear layer gathered again for its weight's gradient. Latent
         attention of q query, c key and value and r rotary elements: 2h + 3q + 3c + 2r. Embedding 2h, output layer 3h.
         Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2
    ep   all-to-all: ((ep-1)/ep + etp-1) t k (4 h b + 8). To the experts and back, forward and backward
         gathered tokens: (ep-1) t 5 h b. Inputs and outputs, their gradients, and inputs again
         Lepikhin et al. 2020, "GShard", section 3.3
    cp   (cp-1) T 3 v b, of split sequences: keys and values of v elements on a rank around a ring, backward with their
         gradients
         Liu et al. 2023, "Ring Attention"; AttnFuncWithCPAndKVP2P of Transformer Engine
    pp   t h b for each neighbour of each virtual stage: activations, and backward their gradients
         Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2
    dp   (n-1)/n (bytes of gradients + bytes of weights) an update: n = dp cp for dense parameters, edp for experts
         Rajbhandari et al. 2020, "ZeRO", section 7.2

Layers that are computed again communicate again as they do forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Coordinates, Layout
from engine3d.memory.activations import keys_and_values
from engine3d.models.family import ModelSpec
from engine3d.models.rules import local_parameters
from engine3d.models.sizes import Latent, Sizes
from engine3d.reshard.describe.source import buffer_rules, parameter_buffers, tied_stages
from engine3d.training.config import TrainConfig
from engine3d.training.optimizer import element_bytes

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class MicroBatchTraffic:
    """Bytes that a rank sends for one micro-batch of an update.

    Args:
        tp: to its tensor-parallel group.
        ep: to the ranks that share a layer's experts, tensor-parallel ranks of experts included.
        cp: to the next rank of its context-parallel group.
        pp: to neighbouring stages.
    """

    tp: float
    ep: float
    cp: float
    pp: float


@dataclass(frozen=True, slots=True)
class _Passes:
    """Amounts that a layer sends forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: _Passes) -> _Passes:
        return _Passes(self.forward + other.forward, self.backward + other.backward)

    def total(self, forwards: int) -> float:
        return forwards * self.forward + self.backward


def micro_batch_traffic(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinates,
    config: TrainConfig,
    *,
    tokens: int,
    transformer_engine: bool = True,
) -> MicroBatchTraffic:
    """Predict what a rank sends for a micro-batch.

    Args:
        spec: a language model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype, recomputation, and how tokens reach their experts.
        tokens: of the micro-batch. The ranks of a context-parallel group have an equal share of them each.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """
    sizes, itemsize = spec.sizes, ITEMSIZES[config.dtype]
    fused = config.has_fused_experts(sizes, layout)
    most_again = math.inf if config.recompute_layers is None else config.recompute_layers
    ring = _Passes(keys_and_values(sizes, layout.tp), 2 * keys_and_values(sizes, layout.tp))
    last = layout.virtual_stages - 1
    elements = 2.0 * sizes.hidden if at.pp == 0 else 0.0  # the embedding
    elements += 3 * sizes.hidden if at.pp == layout.pp - 1 else 0  # the output layer
    of_experts, of_ring, neighbours = 0.0, 0.0, 0
    for chunk, layers in enumerate(spec.rules.rank_layers(layout, at.pp)):
        stage = at.pp + chunk * layout.pp
        neighbours += (stage > 0) + (stage < last)
        for index, layer in enumerate(layers):
            forwards = 2 if config.recompute == "full" and index < most_again else 1
            elements += _tensor_parallel(sizes, layer, transformer_engine=transformer_engine).total(forwards)
            of_ring += ring.total(forwards)
            if sizes.is_sparse(layer):
                of_experts += _experts(sizes, layout, itemsize, fused=fused).total(forwards)
    share = tokens / layout.cp
    rank_tokens = share / layout.tp
    return MicroBatchTraffic(
        tp=(layout.tp - 1) * rank_tokens * elements * itemsize,
        ep=rank_tokens * of_experts,
        cp=(layout.cp - 1) * share * of_ring * itemsize,
        pp=neighbours * rank_tokens * sizes.hidden * itemsize,
    )


def update_traffic(
    spec: ModelSpec, layout: Layout, at: Coordinates, config: TrainConfig, *, transformer_engine: bool = True
) -> float:
    """Predict the bytes that a rank sends in one update to ranks with the same parameters.

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype and optimizer.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """
    of_element = element_bytes(config).gradient + ITEMSIZES[config.dtype]
    dense, experts = buffer_rules(spec.rules, layout)
    total = 0.0
    for rules, copies in ((dense, layout.dp * layout.cp), (experts, layout.edp)):
        if rules is not None:
            local = local_parameters(
                rules, layout, at, transformer_engine=transformer_engine, expert_order=spec.expert_order
            )
            buffers = parameter_buffers(local, copies, tied=tied_stages(spec, layout))
            elements = sum(buffer.elements for buffer in buffers)
            total += (copies - 1) / copies * elements * of_element
    return total


def _tensor_parallel(sizes: Sizes, layer: int, *, transformer_engine: bool) -> _Passes:
    """Elements a token of the complete tensors that a layer gathers and reduces."""
    linear_pair = _Passes(2 * sizes.hidden, 3 * sizes.hidden)
    attention = linear_pair
    if sizes.latent is not None:
        attention = _latent_attention(sizes, sizes.latent, transformer_engine=transformer_engine)
    has_mlp = sizes.shared_ffn or not sizes.is_sparse(layer)
    return attention + linear_pair if has_mlp else attention


def _latent_attention(sizes: Sizes, latent: Latent, *, transformer_engine: bool) -> _Passes:
    """Elements of latent attention. Without Transformer Engine the first projections are cut over the ranks too."""
    hidden, rotary = sizes.hidden, latent.rotary_dim
    made_from = (latent.query_rank or 0) + latent.key_value_rank
    if not transformer_engine:
        return _Passes(3 * hidden + 2 * made_from + 2 * rotary, 5 * hidden + 3 * made_from + 2 * rotary)
    from_hidden = 0 if latent.query_rank else hidden
    return _Passes(hidden + from_hidden + made_from + rotary, hidden + 2 * from_hidden + 2 * made_from + rotary)


def _experts(sizes: Sizes, layout: Layout, itemsize: int, *, fused: bool) -> _Passes:
    """Bytes that a rank sends for each of its tokens in a layer of experts."""
    hidden = sizes.hidden * itemsize
    if fused:
        return _Passes((layout.ep - 1) * 2 * hidden, (layout.ep - 1) * 3 * hidden)
    rows = sizes.experts_per_token * ((layout.ep - 1) / layout.ep + layout.etp - 1)
    return _Passes(rows * (2 * hidden + _FLOAT32), rows * (2 * hidden + _FLOAT32))
