"""Seconds of an update, or of a forward pass, on any layout, from a model's sizes and the rates of its hardware.

A micro-batch on the busiest pipeline stage takes

    sum over kernel classes of FLOPs / (peak x share that the class reaches) + bytes of the other kernels / memory rate

but on a GPU at least the time in which the host launches its layers. A processor runs what it launches, and takes both.
Kernel classes are linear layers, experts, attention. The others are norms, activation functions, routing, permutation
and the logits, as passes over what they read and write, counted in traces of one step
(`benchmarks/results/train/*-kernels.txt`). To this come exchanges of ranks, the bubble of the pipeline,
(pp - 1) / (vpp x micro-batches) of it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), sums of gradients, and
the optimizer, whose state may come from host memory.

Exchanges of tensor, expert and pipeline parallelism wait for each other and for the multiplications. Keys and values of
a context-parallel ring are sent while attention computes, and count as far as they take longer. Imbalance of experts
is not counted: it is in the share that their products reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import attrgetter

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Layout
from engine3d.memory.activations import keys_and_values
from engine3d.models import ModelSpec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec
from engine3d.training.config import TrainConfig
from engine3d.training.flops import PASSES_OF_AN_UPDATE, pair_flops, sequence_flops
from engine3d.training.optimizer import element_bytes
from hybridflow.planning.time.hardware import FLASH_ATTENTION, Hardware

_GATHERS_OF_A_BACKWARD_PASS = 1.5
"""Exchanges of tensor parallelism in a backward pass over those of a forward pass: it gathers the input again for the
gradient of weights."""

_LAYER_PASSES, _LAYER_PASSES_UNFUSED = 23.0, 31.0
"""Passes of an update over a token's hidden state, queries, keys and values in a layer, with one kernel for queries and
keys and without (h200-1gpu-6-layers-kernels.txt, and norms of h200-2gpu-12-layers*-kernels.txt)."""
_LATENT_PASSES = 125.0
"""Further passes of an update over queries, keys and values of multi-head latent attention: expansion of the latents,
rotation and concatenation of their halves, each an operation of its own. It is what memory/deepseek-like takes beyond
attention's share, at one length of sequences (1,290 tokens)."""
_EXPERT_PASSES = 6.0
"""Passes over the rows of a token's experts: input, gate and up projection."""
_HEAD_PASSES = 4.7
"""Passes over a token's logits (`_facts` and `_gradient` of the first of these traces)."""
_GRADIENT_SHARE = 0.8
"""Share of the memory's rate at which a micro-batch's gradients are added up (the bf16 additions of these traces)."""
_EXPERTS_BESIDE_NCCL = 0.87
"""Rate of grouped GEMMs next to NCCL's kernels, which hold processors, over that next to copy engines (the same)."""
_IDLE = 1.05
"""Time of a step over that of its kernels, where kernels bound it."""


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

    def fill(self, layout: Layout) -> float:
        """Count the micro-batches of a data-parallel rank, where the last counts by its share of sequences."""
        return -(-self.sequences // layout.dp) / self.together


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Seconds of an update, or of a forward pass, on the busiest pipeline stage.

    Args:
        linear: matrix multiplications of attention, dense MLPs and the output layer, those of recomputation included.
        experts: grouped GEMMs of experts.
        attention: scores and sums over values.
        memory: kernels that the memory bounds.
        launches: time in which the host launches kernels, beyond theirs.
        tensor: exchanges of tensor parallelism.
        expert: exchanges of experts' tokens.
        context: keys and values that arrive later than attention needs them.
        pipeline: hidden states that are sent to other stages, and their gradients.
        bubble: waits for other stages.
        gradients: sums of gradients and gathers of weights over data- and context-parallel ranks.
        optimizer: Adam, and its state's way from host memory and back.
        call: calls of the ranks, their batches and metrics.
    """

    linear: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    call: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(_seconds_by_kind(self))

    @property
    def compute(self) -> float:
        """Seconds of kernels that compute, and of their launches."""
        return self.linear + self.experts + self.attention + self.memory + self.launches

    def with_exchanges(self, tensor: float, expert: float, context: float) -> UpdateCost:
        """Return the cost of these kernels with exchanges of ranks."""
        return UpdateCost(
            self.linear, self.experts, self.attention, self.memory, self.launches, tensor, expert, context
        )

    def scaled(self, factor: float) -> UpdateCost:
        """Return the cost of as many updates."""
        return UpdateCost(*[factor * seconds for seconds in _seconds_by_kind(self)])


_seconds_by_kind: Callable[[UpdateCost], tuple[float, ...]] = attrgetter(*(field.name for field in fields(UpdateCost)))


@dataclass(frozen=True, slots=True)
class _StageSums:
    """Sums over the layers of a pipeline stage.

    Args:
        stage: its number.
        layers, sparse: of the stage, and those with experts.
        multiplications: of a token.
        dense, experts: elements of parameters, of all experts.
    """

    stage: int
    layers: int
    sparse: int
    multiplications: int
    dense: int
    experts: int


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
        return replace(self.passes(layout, config, batch), **self.optimizer(layout, config))

    def forward(self, layout: Layout, config: TrainConfig, batch: Batch) -> UpdateCost:
        """Predict the seconds of a forward pass over the batch, as old log-probs, values and scores need it."""
        return self.passes(layout, config, batch, trained=False)

    def passes(self, layout: Layout, config: TrainConfig, batch: Batch, *, trained: bool = True) -> UpdateCost:
        """Predict the seconds of the forward and backward passes of an update, or of forward passes alone.

        They depend neither on the optimizer nor on selective recomputation.
        """
        count, slowest = batch.micro_batches(layout), self.micro_batch(layout, config, batch, trained=trained)
        sending = self.sending(layout, config, batch, trained=trained)
        total = slowest.scaled(batch.fill(layout) if layout.pp == 1 else count)
        bubble = layout.bubble(count) * count * (slowest.seconds + sending)
        return replace(total, pipeline=count * sending, bubble=bubble, call=self.call(trained=trained))

    def micro_batch(self, layout: Layout, config: TrainConfig, batch: Batch, *, trained: bool) -> UpdateCost:
        """Predict the seconds of a micro-batch on the stage that takes the longest. They do not depend on dp."""
        passes = PASSES_OF_AN_UPDATE if trained else 1
        costs = (self._stage(layout, stage, config, batch, passes) for stage in self.stages(layout))
        return max(costs, key=lambda cost: cost.seconds)

    def sending(self, layout: Layout, config: TrainConfig, batch: Batch, *, trained: bool) -> float:
        """Predict the seconds in which each chunk sends a micro-batch to the next, and its gradients back."""
        if layout.pp == 1:
            return 0.0
        ways = 2 if trained else 1
        rank_tokens = batch.tokens * batch.together / (layout.cp * layout.tp)
        nbytes = ways * rank_tokens * self.spec.sizes.hidden * ITEMSIZES[config.dtype] * layout.vpp
        return self.hardware.ring_s(nbytes, layout.pp, layout.stage_size, ways * layout.vpp)

    def call(self, *, trained: bool) -> float:
        """Seconds of an update, or of forward passes, next to its micro-batches."""
        return self.hardware.update_s if trained else self.hardware.scoring_s

    def optimizer(self, layout: Layout, config: TrainConfig) -> dict[str, float]:
        """Predict the seconds of an update after its passes: "gradients" and "optimizer" of `UpdateCost`."""
        if config.lora is not None:
            return self._of_adapters(config.lora).optimizer(layout, config.model_copy(update={"lora": None}))
        stages = self.stages(layout)
        return {
            "gradients": max(self._gradients(layout, stage, config) for stage in stages),
            "optimizer": max(self._optimizer(layout, stage, config) for stage in stages),
        }

    def _of_adapters(self, lora: LoraConfig) -> CostModel:
        """Costs of the model's adapters, as a model of their own."""
        if lora not in self._adapters:
            self._adapters[lora] = CostModel(AdapterSpec.of(self.spec, lora), self.hardware)
        return self._adapters[lora]

    @cached_property
    def _adapters(self) -> dict[LoraConfig, CostModel]:
        return {}

    def elements(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Count the elements of a rank's parameters without padding: of dense layers, and of experts."""
        known = next((sums for sums in self.stages(layout) if sums.stage == stage), None)
        return self._elements_of(layout, known or self._sums(layout, stage))

    def _elements_of(self, layout: Layout, sums: _StageSums) -> tuple[float, float]:
        has_vocabulary = sums.stage in (0, layout.pp - 1) and not self.spec.adapters
        vocabulary = has_vocabulary * self.spec.sizes.vocabulary * self.spec.sizes.hidden
        return (sums.dense + vocabulary) / layout.tp, sums.experts / (layout.ep * layout.etp)

    def stages(self, layout: Layout) -> list[_StageSums]:
        """List the sums of the stages that differ, see `distinct_stages`."""
        key = (layout.pp, layout.vpp, layout.stages)
        if key not in self._stages:
            self._stages[key] = [self._sums(layout, stage) for stage in distinct_stages(self.spec, layout)]
        return self._stages[key]

    def _sums(self, layout: Layout, stage: int) -> _StageSums:
        chunks = self.spec.rules.rank_layers(layout, stage)
        names = (self._sparse, self._multiplications, self._dense, self._experts)
        return _StageSums(stage, sum(map(len, chunks)), *(_within(until, chunks) for until in names))

    @cached_property
    def _stages(self) -> dict[tuple[int, int, tuple[int, ...] | None], list[_StageSums]]:
        return {}

    def utilisation(self, layout: Layout, cost: UpdateCost, batch: Batch) -> float:
        """Compute the share of the peak that the model's multiplications take, without recomputation (MFU)."""
        flops = PASSES_OF_AN_UPDATE * float(sequence_flops(self.spec, batch.tokens)) * batch.sequences
        return flops / (layout.world_size * self.hardware.flops * cost.seconds)

    def _stage(self, layout: Layout, stage: _StageSums, config: TrainConfig, batch: Batch, passes: int) -> UpdateCost:
        """Predict the seconds of a micro-batch on a stage: kernels, launches, and exchanges over tp, ep and cp."""
        sizes, itemsize, layers, sparse = self.spec.sizes, ITEMSIZES[config.dtype], stage.layers, stage.sparse
        repeated = self._repeated(layout, config, layers) if passes > 1 else 0.0  # of a further forward pass
        tokens = batch.tokens * batch.together
        cost = self._kernels(layout, stage, config, batch, passes, repeated)
        hidden = tokens / layout.cp * sizes.hidden * itemsize
        gathered = 2 * (2 * layers - (0 if sizes.shared_ffn else sparse)) * hidden * (layout.tp - 1) / layout.tp
        exchanges = 1 + (passes > 1) * _GATHERS_OF_A_BACKWARD_PASS + repeated
        tensor = self.hardware.exchange_s(gathered * exchanges, layout.tp, times=4 * layers * exchanges)
        ways = (1 if passes == 1 else 2) + repeated
        group = layout.ep * layout.etp
        sent = sizes.experts_per_token * (layout.ep - 1) / layout.ep
        if config.gathers_tokens(layout):
            sent = group - 1.0
        routed = 2 * sparse * hidden / layout.tp * sent
        # Tokens there and back; Megatron-Core's dispatchers count them first, and send their weights apart.
        messages = 2 * ways if config.has_fused_experts(sizes, layout) else 3 * ways + 1
        expert = self.hardware.exchange_s(
            routed * ways,
            group,
            1 if layout.etp > 1 else layout.etp,
            times=sparse * messages,
            at_once=not config.gathers_tokens(layout),
        )
        # Complete sequences on each rank take no keys and values of others (`MicroBatchPlan`).
        is_split = batch.together % layout.cp > 0
        ring = is_split * layers * (layout.cp - 1) * keys_and_values(sizes, layout.tp) * tokens / layout.cp * itemsize
        rounds = (1 if passes == 1 else 3) + repeated
        messages = is_split * layers * (layout.cp - 1) * ways
        sending = self.hardware.ring_s(ring * rounds, layout.cp, layout.tp, messages)
        return cost.with_exchanges(tensor, expert, max(0.0, sending - cost.attention))

    @staticmethod
    def _repeated(layout: Layout, config: TrainConfig, layers: int) -> float:
        """Compute the share of a forward pass that the backward pass makes again."""
        again = layers if config.recompute == "full" else 0
        if config.recompute_layers is not None:
            again = min(layers, config.recompute_layers * layout.vpp)
        return again / layers

    def _kernels(
        self, layout: Layout, stage: _StageSums, config: TrainConfig, batch: Batch, passes: int, repeated: float
    ) -> UpdateCost:
        """Predict the seconds of a micro-batch's kernels on a stage, by class, and of their launches."""
        sizes, hardware, layers, sparse = self.spec.sizes, self.hardware, stage.layers, stage.sparse
        tokens, ranks = batch.tokens * batch.together, layout.tp * layout.cp
        rate = hardware.flops * hardware.attention * (FLASH_ATTENTION if config.has_flash_attention else 1.0)
        if sizes.latent is not None:
            rate = hardware.flops * hardware.latent_attention
        attention = (passes + repeated) * layers / sizes.layers * pair_flops(sizes) * tokens * batch.tokens / rate
        per_token = 3 * sizes.hidden * sizes.expert_ffn * sizes.experts_per_token
        # Weights with adapters have no gradients; adapters have a few thousandths of their multiplications.
        of_weights = passes - (passes > 1 and config.lora is not None)
        linear = (of_weights + repeated) * (stage.multiplications - sparse * per_token)
        if stage.stage == layout.pp - 1:
            linear += (of_weights + (passes > 1 and config.logits_tokens is not None)) * self.spec.rules.head_cost
        width = min(sizes.hidden, sizes.heads * sizes.head_dim / layout.tp)
        products = 2 * (of_weights + repeated) * sparse * per_token * tokens / ranks
        linear_s = 2 * linear * tokens / ranks / hardware.linear_rate(width)
        experts_s = products / self._expert_rate(layout, config)
        eager = (1 if passes == 1 else 1 + hardware.backward) + repeated
        memory_s = self._passes_over_memory(layout, stage, config, tokens / ranks, passes, eager)
        attention_s = attention / ranks
        if config.packing:
            attention_s += eager * layers * batch.together / layout.cp * hardware.sequence_s
        compute = linear_s + experts_s + attention_s + memory_s
        of_sparse = hardware.sparse_layer_s if config.has_fused_experts(sizes, layout) else hardware.unfused_layer_s
        launched = eager * ((layers - sparse) * hardware.layer_s + sparse * of_sparse)
        # A processor runs what it launches itself.
        launches = launched if hardware.cores else max((_IDLE - 1) * compute, launched - compute)
        return UpdateCost(linear_s, experts_s, attention_s, memory_s, launches)

    def _expert_rate(self, layout: Layout, config: TrainConfig) -> float:
        """FLOP/s of experts' products."""
        hardware, sizes = self.hardware, self.spec.sizes
        if not config.has_fused_experts(sizes, layout):
            return hardware.flops * hardware.unfused_experts
        beside = layout.ep > 1 and not config.has_copy_engine_dispatcher(sizes, layout)
        return hardware.flops * hardware.experts * (_EXPERTS_BESIDE_NCCL if beside else 1.0)

    def _passes_over_memory(
        self, layout: Layout, stage: _StageSums, config: TrainConfig, tokens: float, passes: int, eager: float
    ) -> float:
        """Predict the seconds of the kernels that read and write more than they compute, and of gradients' sums.

        Args:
            tokens: of a micro-batch on a rank.
            eager: time of the passes over that of a forward pass.
        """
        sizes, itemsize, layers, sparse = self.spec.sizes, ITEMSIZES[config.dtype], stage.layers, stage.sparse
        share = eager / PASSES_OF_AN_UPDATE
        wide = sizes.hidden + (sizes.heads + 2 * sizes.groups) * sizes.head_dim
        apart = (sizes.qk_norm or sizes.norm_over_heads) and not config.fused_query_key
        per_layer = (_LAYER_PASSES_UNFUSED if apart else _LAYER_PASSES) * wide
        if sizes.latent is not None:
            per_layer += _LATENT_PASSES * (wide - sizes.hidden)
        rows = sparse * sizes.experts_per_token * (sizes.hidden + 2 * sizes.expert_ffn)
        rows += (layers - sparse) * 2 * sizes.ffn + sparse * 2 * sizes.shared_ffn
        elements = share * (layers * per_layer + _EXPERT_PASSES * rows)
        if stage.stage == layout.pp - 1 and not self.spec.value_head:
            elements += passes / PASSES_OF_AN_UPDATE * _HEAD_PASSES * sizes.vocabulary
        nbytes = elements * itemsize * tokens / self.hardware.passes
        if passes > 1:  # a micro-batch's gradients are read and added to their sum
            of_element = itemsize + 2 * element_bytes(config).gradient
            trained = self if config.lora is None else self._of_adapters(config.lora)
            of_stage = stage if config.lora is None else trained._sums(layout, stage.stage)
            nbytes += sum(trained._elements_of(layout, of_stage)) * of_element / _GRADIENT_SHARE
        return nbytes / self.hardware.memory_rate

    def _optimizer(self, layout: Layout, stage: _StageSums, config: TrainConfig) -> float:
        """Predict the seconds of Adam on a rank's shard of parameters, and of its state's ways over the host's link."""
        of_element, hardware = element_bytes(config), self.hardware
        dense, experts = self._elements_of(layout, stage)
        shard = dense / (layout.dp * layout.cp) + experts / layout.edp
        # Gradients are read, weights, masters and moments read and written.
        touched = of_element.gradient + 2 * (ITEMSIZES[config.dtype] + of_element.master + of_element.moments)
        seconds = shard * touched / (hardware.memory_rate * hardware.adam)
        if config.optimizer.offload:
            ranks = min(hardware.gpus_per_node, layout.world_size)
            rate = min(hardware.host_rate, hardware.node_host_rate / ranks)
            seconds = max(seconds, shard * of_element.moments / rate)
        return seconds

    def _gradients(self, layout: Layout, stage: _StageSums, config: TrainConfig) -> float:
        """Predict the seconds of scattered sums of gradients and of gathers of weights, over ranks with copies."""
        of_element = element_bytes(config).gradient + ITEMSIZES[config.dtype]
        dense, experts = (elements * of_element for elements in self._elements_of(layout, stage))
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
