"""Seconds of an update on any layout, predicted from a model's sizes and the rates of its GPUs, to compare layouts by.

Counted are the multiplications of the busiest pipeline stage, the pipeline's bubble, and bytes that ranks exchange.
Exchanges of tensor, expert and pipeline parallelism wait for each other and for the multiplications. Keys and values of
a context-parallel ring are sent while attention computes, and count as far as they take longer. Norms, activation
functions, memory traffic and the imbalance of experts are not counted: they are in the share of the peak that
multiplications reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from math import prod

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Layout
from engine3d.memory.activations import keys_and_values
from engine3d.models import ModelSpec
from engine3d.training.config import TrainConfig
from engine3d.training.flops import PASSES_OF_AN_UPDATE, pair_flops, sequence_flops
from engine3d.training.optimizer import element_bytes

_GATHERS_OF_A_BACKWARD_PASS = 1.5
"""Exchanges of tensor parallelism in a backward pass over those of a forward pass: it gathers the input again for the
gradient of weights."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a GPU and of its links.

    Args:
        flops: of dense bf16 multiplications at the peak, a second.
        efficiency: share of it that multiplications reach.
        memory: bytes.
        gpus_per_node: of a node.
        node_rate: bytes a second, one way, between a GPU and the others of its node.
        network_rate: bytes a second, one way, between a GPU and other nodes.
        layer_s: seconds in which a host launches one pass of a layer: the least that it takes.
        message_s: seconds until a message arrives, however short.
    """

    flops: float = 989e12
    efficiency: float = 0.5
    memory: int = 141 * 10**9
    gpus_per_node: int = 8
    node_rate: float = 390e9
    network_rate: float = 45e9
    layer_s: float = 1e-3
    message_s: float = 10e-6

    def exchange_s(self, nbytes: float, group: int, stride: int = 1, times: float = 1.0) -> float:
        """Predict the seconds in which a rank sends bytes evenly to the others of a group.

        Args:
            nbytes: to all others together, in all exchanges.
            group: ranks of the group.
            stride: distance between two of them, in ranks.
            times: number of exchanges.
        """
        if group == 1:
            return 0.0
        near = max(1, min(group, self.gpus_per_node // stride))
        within = nbytes * (near - 1) / (group - 1)
        sending = max(within / self.node_rate, (nbytes - within) / self.network_rate)
        return sending + times * (group - 1) * self.message_s

    def ring_s(self, nbytes: float, group: int, stride: int, times: float) -> float:
        """Predict the seconds in which a rank sends bytes to the next of a ring, in a number of messages."""
        rate = self.node_rate if group * stride <= self.gpus_per_node else self.network_rate
        return nbytes / rate + times * self.message_s


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of an update.

    Args:
        sequences: of all data-parallel ranks.
        tokens: of each.
        together: in a micro-batch.
    """

    sequences: int
    tokens: int
    together: int = 1

    def micro_batches(self, layout: Layout) -> int:
        """Count the micro-batches of a data-parallel rank, a multiple of pp where there are virtual stages."""
        count = -(-self.sequences // (layout.dp * self.together))
        return count if layout.vpp == 1 else -(-count // layout.pp) * layout.pp


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Seconds of an update on the busiest pipeline stage.

    Args:
        compute: multiplications, those of recomputation included.
        tensor: exchanges of tensor parallelism.
        expert: exchanges of experts' tokens.
        context: keys and values that arrive later than attention needs them.
        pipeline: hidden states that are sent to other stages, and their gradients.
        bubble: waits for other stages.
        gradients: sums of gradients and gathers of weights over data- and context-parallel ranks.
    """

    compute: float
    tensor: float
    expert: float
    context: float
    pipeline: float
    bubble: float
    gradients: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class CostModel:
    """Costs of a model's updates on layouts that pass its `check_layout`.

    Args:
        spec: the model.
        hardware: of every rank.
    """

    spec: ModelSpec
    hardware: Hardware

    def update(self, layout: Layout, config: TrainConfig, batch: Batch) -> UpdateCost:
        """Predict the seconds of an update."""
        count, itemsize = batch.micro_batches(layout), ITEMSIZES[config.dtype]
        stages = distinct_stages(self.spec, layout)
        slowest = max((self._stage(layout, stage, config, batch) for stage in stages), key=sum)
        # Of a micro-batch hidden states go on to the next stage and gradients back, for each model chunk.
        rank_tokens = batch.tokens * batch.together / (layout.cp * layout.tp)
        between = 2 * rank_tokens * self.spec.sizes.hidden * itemsize * layout.vpp if layout.pp > 1 else 0.0
        messages = 2 * layout.vpp if layout.pp > 1 else 0
        sending = self.hardware.ring_s(between, layout.pp, layout.stage_size, messages)
        compute, tensor, expert, context = (count * seconds for seconds in slowest)
        return UpdateCost(
            compute=compute,
            tensor=tensor,
            expert=expert,
            context=context,
            pipeline=count * sending,
            bubble=layout.bubble(count) * count * (sum(slowest) + sending),
            gradients=max(self._gradients(layout, stage, config) for stage in stages),
        )

    def elements(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Count the elements of a rank's parameters without padding: of dense layers, and of experts."""
        chunks = self.spec.rules.rank_layers(layout, stage)
        vocabulary = (stage in (0, layout.pp - 1)) * self.spec.sizes.vocabulary * self.spec.sizes.hidden
        return (
            (_within(self._dense, chunks) + vocabulary) / layout.tp,
            _within(self._experts, chunks) / (layout.ep * layout.etp),
        )

    def utilisation(self, layout: Layout, cost: UpdateCost, batch: Batch) -> float:
        """Compute the share of the peak that the model's multiplications take, without recomputation (MFU)."""
        flops = PASSES_OF_AN_UPDATE * float(sequence_flops(self.spec, batch.tokens)) * batch.sequences
        return flops / (layout.world_size * self.hardware.flops * cost.seconds)

    def _stage(
        self, layout: Layout, stage: int, config: TrainConfig, batch: Batch
    ) -> tuple[float, float, float, float]:
        """Predict the seconds of a micro-batch on a stage: multiplications, and exchanges over tp, ep and cp."""
        sizes, itemsize, chunks = self.spec.sizes, ITEMSIZES[config.dtype], self.spec.rules.rank_layers(layout, stage)
        layers, sparse = sum(map(len, chunks)), _within(self._sparse, chunks)
        again = layers if config.recompute == "full" else 0
        if config.recompute_layers is not None:
            again = min(layers, config.recompute_layers * layout.vpp)
        repeated = again / layers  # of a further forward pass
        tokens = batch.tokens * batch.together
        rate = layout.tp * layout.cp * self.hardware.flops * self.hardware.efficiency
        passes = PASSES_OF_AN_UPDATE + repeated
        attention = passes * layers / sizes.layers * pair_flops(sizes) * tokens * batch.tokens / rate
        linear = passes * _within(self._multiplications, chunks)
        if stage == layout.pp - 1:
            linear += (PASSES_OF_AN_UPDATE + (config.logits_tokens is not None)) * self.spec.rules.head_cost
        hidden = tokens / layout.cp * sizes.hidden * itemsize
        gathered = 2 * (2 * layers - (0 if sizes.shared_ffn else sparse)) * hidden * (layout.tp - 1) / layout.tp
        exchanges = 1 + _GATHERS_OF_A_BACKWARD_PASS + repeated
        tensor = self.hardware.exchange_s(gathered * exchanges, layout.tp, times=4 * layers * exchanges)
        routed = 2 * sparse * hidden / layout.tp * sizes.experts_per_token * (layout.ep - 1) / layout.ep
        expert = self.hardware.exchange_s(
            routed * (2 + repeated), layout.ep, layout.etp, times=2 * sparse * (2 + repeated)
        )
        # Complete sequences on each rank take no keys and values of others (`MicroBatchPlan`).
        is_split = batch.together % layout.cp > 0
        ring = is_split * layers * (layout.cp - 1) * keys_and_values(sizes, layout.tp) * tokens / layout.cp * itemsize
        messages = is_split * layers * (layout.cp - 1) * (2 + repeated)
        sending = self.hardware.ring_s(ring * (1 + 2 + repeated), layout.cp, layout.tp, messages)
        compute = max(attention + 2 * linear * tokens / rate, passes * layers * self.hardware.layer_s)
        return compute, tensor, expert, max(0.0, sending - attention)

    def _gradients(self, layout: Layout, stage: int, config: TrainConfig) -> float:
        """Predict the seconds of scattered sums of gradients and of gathers of weights, over ranks with copies."""
        of_element = element_bytes(config).gradient + ITEMSIZES[config.dtype]
        dense, experts = (elements * of_element for elements in self.elements(layout, stage))
        copies = layout.dp * layout.cp
        return self.hardware.exchange_s(dense * (copies - 1) / copies, copies, layout.tp) + self.hardware.exchange_s(
            experts * (layout.edp - 1) / layout.edp, layout.edp, layout.ep * layout.etp
        )

    @cached_property
    def _multiplications(self) -> list[int]:
        return [0, *accumulate(self.spec.rules.layer_costs)]

    @cached_property
    def _sparse(self) -> list[int]:
        return [0, *accumulate(int(self.spec.sizes.is_sparse(layer)) for layer in range(self.spec.sizes.layers))]

    @cached_property
    def _dense(self) -> list[int]:
        return self._elements(per_expert=False)

    @cached_property
    def _experts(self) -> list[int]:
        return self._elements(per_expert=True)

    def _elements(self, *, per_expert: bool) -> list[int]:
        """Count the elements of the parameters before each layer: those of experts, or all others."""
        copies = self.spec.sizes.experts if per_expert else 1
        of_layers = [
            sum(prod(tensor.shape) for rule in rules if rule.per_expert == per_expert for tensor in rule.cut.tensors)
            for rules in self.spec.rules.layers
        ]
        return [0, *accumulate(copies * elements for elements in of_layers)]


def distinct_stages(spec: ModelSpec, layout: Layout) -> list[int]:
    """List pipeline stages that differ in their layers, and the first and the last: of stages alike the first.

    That one has the most micro-batches in flight.
    """
    kinds: dict[tuple[object, ...], int] = {}
    for stage in range(layout.pp):
        layers = [[spec.sizes.is_sparse(layer) for layer in chunk] for chunk in spec.rules.rank_layers(layout, stage)]
        sparse = tuple((len(chunk), sum(chunk)) for chunk in layers)
        kinds.setdefault((stage == 0, stage == layout.pp - 1, sparse), stage)
    return list(kinds.values())


def _within(until: Sequence[int], chunks: Sequence[range]) -> int:
    """Sum over the layers of some chunks, from the sums before each layer."""
    return sum(until[chunk.stop] - until[chunk.start] for chunk in chunks)
