"""Cost of a checkpoint for each rank, from shapes alone: files, bytes written and read, host memory.

Megatron-Core's distributed optimizer cuts every buffer of parameters evenly over the ranks that have it. A rank writes
the fp32 weight and Adam's two moments of the elements of its own range; of those that other tensor-parallel ranks or
pipeline stages have too, only the first. On the same layout it reads what its range holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from engine3d.checkpoint.digests.chunks import MAX_CHUNK_BYTES, flat_chunks
from engine3d.errors import EngineError
from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import LocalParameter, ModelRules, local_parameters
from engine3d.reshard.describe.source import ParameterBuffer, buffer_rules, parameter_buffers, tied_stages

_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share of a checkpoint.

    Args:
        state: bytes of the state that lives on this rank, padding and copies included: its share.
        written: bytes of tensors that it writes.
        read: bytes of tensors that it reads on the same layout.
        host: bytes of state that an asynchronous save copies to host memory: what is written, and what pads it.
        chunks: of tensors that it writes.
        files: that they are in.
    """

    state: int = 0
    written: int = 0
    read: int = 0
    host: int = 0
    chunks: int = 0
    files: int = 0

    def __add__(self, other: RankPlan) -> RankPlan:
        return RankPlan(
            self.state + other.state,
            self.written + other.written,
            self.read + other.read,
            self.host + other.host,
            self.chunks + other.chunks,
            self.files + other.files,
        )


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """A role's checkpoint.

    Args:
        state: bytes of the model's state, every element once.
        ranks: in order.
    """

    state: int
    ranks: tuple[RankPlan, ...]

    def node_host(self, gpus_per_node: int) -> list[int]:
        """Host memory of an asynchronous save on each node, in bytes."""
        host = [rank.host for rank in self.ranks]
        return [sum(host[first : first + gpus_per_node]) for first in range(0, len(host), gpus_per_node)]

    def check(self) -> None:
        """Every element is written once, and no rank writes, reads or copies more than its share.

        Raises:
            EngineError: otherwise.
        """
        if (written := sum(rank.written for rank in self.ranks)) != self.state:
            raise EngineError(f"checkpoint plan: {written} bytes are written of a state of {self.state}")
        for number, rank in enumerate(self.ranks):
            if max(rank.written, rank.read, rank.host) > rank.state:
                raise EngineError(
                    f"checkpoint plan: rank {number} writes {rank.written} bytes, reads {rank.read} and copies "
                    f"{rank.host} to host memory, with a state of {rank.state}"
                )


def plan_checkpoint(
    spec: ModelSpec,
    layout: Layout,
    *,
    precision_aware: bool = False,
    threads: int = 4,
    transformer_engine: bool = True,
) -> CheckpointPlan:
    """The checkpoint of a model that Adam trains on a layout, whatever the dtype of the model's own weights.

    Args:
        spec: the model.
        layout: of the trainer.
        precision_aware: moments in bf16, not fp32.
        threads: that write on each rank, each a file.
        transformer_engine: whether the model is built from Transformer Engine's layers.

    Raises:
        UserError: the layout does not fit the model.
        EngineError: `CheckpointPlan.check` fails.
    """
    spec.check_layout(layout)
    moment = _BFLOAT16 if precision_aware else _FLOAT32
    planner = _RankPlanner(spec, layout, (_FLOAT32, moment, moment), transformer_engine)
    ranks = [planner.rank(at) for _, at in layout.ranks()]
    buffers = sum(prod(tensor.shape) for tensor in spec.hf_tensors.values() if tensor.buffer)
    plan = CheckpointPlan(
        spec.parameter_count() * planner.element + buffers * _FLOAT32,
        tuple(replace(rank, files=min(threads, rank.chunks)) for rank in ranks),
    )
    plan.check()
    return plan


class _RankPlanner:
    """Plans of all ranks. What ranks have in common is worked out once."""

    def __init__(self, spec: ModelSpec, layout: Layout, kinds: tuple[int, ...], transformer_engine: bool) -> None:
        self.element = sum(kinds)
        self._spec = spec
        self._layout = layout
        self._kinds = kinds
        self._transformer_engine = transformer_engine
        self._tied = tied_stages(spec, layout)
        self._dense, self._experts = buffer_rules(spec.rules, layout)
        self._float32 = _only_buffers(spec.rules)
        self._planned: dict[tuple[int, ...], list[RankPlan]] = {}

    def rank(self, at: Coordinates) -> RankPlan:
        layout = self._layout
        plan = self._buffer_plans((at.pp, at.tp), self._dense, at, layout.dp * layout.cp)[at.dp * layout.cp + at.cp]
        if self._experts is not None:
            plan += self._buffer_plans((at.pp, at.ep, at.etp), self._experts, at, layout.edp)[at.edp]
        for local in self._local(self._float32, at):
            size = prod(local.shape) * _FLOAT32
            plan += RankPlan(state=size, read=size)
            if local.owner:
                plan += RankPlan(written=size, host=size, chunks=1)
        return plan

    def _buffer_plans(self, key: tuple[int, ...], rules: ModelRules, at: Coordinates, copies: int) -> list[RankPlan]:
        """Plan the buffers of some rules, for each of the ranks that have the same ones."""
        if key not in self._planned:
            buffers = parameter_buffers(self._local(rules, at), copies, tied=self._tied)
            self._planned[key] = [
                sum((self._cut(buffer, copy, copies) for buffer in buffers), RankPlan()) for copy in range(copies)
            ]
        return self._planned[key]

    def _cut(self, buffer: ParameterBuffer, copy: int, copies: int) -> RankPlan:
        """Plan the shard of a buffer that a rank's optimizer owns."""
        plan = RankPlan(state=buffer.elements // copies * self.element)
        for first, last in buffer.buckets:
            size = (last - first) // copies
            low, high = first + copy * size, first + (copy + 1) * size
            for local, offset in buffer.starts:
                start, stop = max(low - offset, 0), min(high - offset, prod(local.shape))
                if start < stop:
                    plan += self._range(local, start, stop)
        return plan

    def _range(self, local: LocalParameter, start: int, stop: int) -> RankPlan:
        """Plan a range of a parameter's elements."""
        plan = RankPlan()
        for itemsize in set(self._kinds):
            kinds = self._kinds.count(itemsize)
            lengths = [chunk.length for chunk in flat_chunks(local, start, stop, MAX_CHUNK_BYTES // itemsize)]
            nbytes = kinds * sum(lengths) * itemsize
            plan += RankPlan(read=nbytes)
            if local.primary:
                host = kinds * (stop - start) * itemsize
                plan += RankPlan(written=nbytes, host=host, chunks=kinds * len(lengths))
        return plan

    def _local(self, rules: ModelRules, at: Coordinates) -> list[LocalParameter]:
        return local_parameters(
            rules,
            self._layout,
            at,
            transformer_engine=self._transformer_engine,
            expert_order=self._spec.expert_order,
        )


def _only_buffers(rules: ModelRules) -> ModelRules:
    layers = tuple(tuple(rule for rule in layer if rule.buffer) for layer in rules.layers)
    return replace(rules, first=(), layers=layers, last=())
