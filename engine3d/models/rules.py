"""Weight rules: one Megatron parameter <-> the HuggingFace tensors it is made of, and how it is cut over ranks.

A family declares its rules once. Import, export, resharding and checkpoints all evaluate the same list, so there is no
second converter that could disagree with the first. Evaluation is integer arithmetic on shapes: it needs no model and
no process, and works for one rank of thousands.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from engine3d.layout import Coordinates, Layout, balanced_stages

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_PREFIX = "lora_"
"""Beginning of the last name of an adapter's parameter."""

Box = tuple[tuple[int, int], ...]
"""A range (start, stop) for each dimension of a tensor."""

ExpertOrder = Literal["ascending", "descending"]
"""Order of the experts of one rank: as in the HuggingFace model, or from the last to the first."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the HuggingFace model, or of a rule the matrix or vector of one expert in a tensor of all experts.

    Args:
        name: its name, which may contain `{layer}` and `{expert}`.
        shape: its shape; of one expert's, that of a layer's weight, [out, in] or [out].
        init: how random weights fill it.
        optional: True if files may lack it; `init` then fills it.
        buffer: True if it is a buffer of the model and not a parameter: never trained by the optimizer, and float32 in
            every model and file, whatever the dtype of the rest.
        fp8: True if a model in fp8 has it quantised (`precision`).
        stacked: experts of the tensor that has one's matrix, [experts, in, out], or vector, [experts, out]; 0 for a
            tensor of its own.
    """

    name: str
    shape: tuple[int, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    optional: bool = False
    buffer: bool = False
    fp8: bool = False
    stacked: int = 0

    @property
    def dtype(self) -> str | None:
        """The dtype that it has whatever the others have; None where it has theirs."""
        return "float32" if self.buffer else None

    def at(self, layer: int, expert: int) -> HFTensor:
        """The tensor of one layer and one expert, numbered as in the HuggingFace model."""
        name = self.name.format(layer=layer, expert=expert)
        shape = (self.stacked, *reversed(self.shape)) if self.stacked else self.shape
        return HFTensor(name, shape, self.init, self.optional, self.buffer, self.fp8)  # `replace` is slow


def module_of(tensor: str) -> str:
    """Name of the module that has a weight, as lists of unquantised modules name it: a layer's experts are one."""
    module, experts, _ = tensor.removesuffix(".weight").partition(".experts.")
    return module + experts.removesuffix(".")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The elements `hf_box` of a HuggingFace tensor are the elements `local_box` of a local parameter.

    The boxes have the same extent in every dimension. In a tensor of all experts, whose first dimension counts them,
    the other dimensions are the parameter's in reverse.
    """

    hf_name: str
    hf_box: Box
    local_box: Box

    @property
    def is_stacked(self) -> bool:
        """True if the tensor is one of all experts."""
        return len(self.hf_box) > len(self.local_box)

    def strides(self, local: Sequence[int]) -> tuple[int, ...]:
        """Strides of the tensor's dimensions in memory where the parameter's are `local`."""
        return (0, *reversed(local)) if self.is_stacked else tuple(local)

    def to_hf(self, values: Tensor) -> Tensor:
        """View values of the box of the parameter as those of the box of the tensor."""
        return values.permute(*reversed(range(values.dim())))[None] if self.is_stacked else values


@dataclass(frozen=True, slots=True)
class ExpertNumbering:
    """Numbering of Megatron's experts (over all ranks) in the HuggingFace model."""

    per_rank: int
    order: ExpertOrder = "ascending"

    def hf(self, expert: int) -> int:
        if self.order == "ascending":
            return expert
        rank, local = divmod(expert, self.per_rank)
        return rank * self.per_rank + self.per_rank - 1 - local


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard of a cut parameter on one rank."""

    rank: int
    count: int
    experts: ExpertNumbering

    def bounds(self, length: int) -> tuple[int, int]:
        """This rank's range of `length` elements cut evenly."""
        size = length // self.count
        return self.rank * size, (self.rank + 1) * size


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of elements along the axis of a cut: elements [hf_start, hf_start + length) of one HuggingFace tensor."""

    tensor: HFTensor
    hf_start: int
    local_start: int
    length: int


class Cut(ABC):
    """Composition of a parameter from HuggingFace tensors, along one axis."""

    axis: ClassVar[int] = 0
    replicated: ClassVar[bool] = False

    @property
    @abstractmethod
    def tensors(self) -> tuple[HFTensor, ...]:
        """The tensors that the parameter is made of."""

    @abstractmethod
    def segments(self, shard: Shard) -> Iterator[Segment]:
        """Segments of the shard."""

    def local_length(self, count: int) -> int:
        """Elements of the local parameter along the axis, with the cut over `count` ranks."""
        return sum(tensor.shape[self.axis] for tensor in self.tensors) // count

    def local_shape(self, count: int) -> tuple[int, ...]:
        shape = self.tensors[0].shape
        return (*shape[: self.axis], self.local_length(count), *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Replicated(Cut):
    """Complete on every rank."""

    tensor: HFTensor
    replicated: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return (self.tensor,)

    def segments(self, shard: Shard) -> Iterator[Segment]:
        yield Segment(self.tensor, 0, 0, self.tensor.shape[0])

    def local_length(self, count: int) -> int:
        return self.tensor.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertRows(Replicated):
    """Complete on every rank, one row an expert, in the order in which Megatron numbers the experts."""

    def segments(self, shard: Shard) -> Iterator[Segment]:
        rows = self.tensor.shape[0]
        if shard.experts.order == "ascending":
            yield Segment(self.tensor, 0, 0, rows)
        else:
            for row in range(rows):
                yield Segment(self.tensor, shard.experts.hf(row), row, 1)


@dataclass(frozen=True, slots=True)
class ColumnParallel(Cut):
    """Cut along the output dimension, the first."""

    tensor: HFTensor

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return (self.tensor,)

    def segments(self, shard: Shard) -> Iterator[Segment]:
        start, stop = shard.bounds(self.tensor.shape[self.axis])
        yield Segment(self.tensor, start, 0, stop - start)


@dataclass(frozen=True, slots=True)
class RowParallel(ColumnParallel):
    """Cut along the input dimension, the second."""

    axis: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Vocabulary(ColumnParallel):
    """Cut along the vocabulary, padded with rows that the HuggingFace model does not have."""

    def segments(self, shard: Shard) -> Iterator[Segment]:
        size = self.local_length(shard.count)
        start = shard.rank * size
        stop = min(start + size, self.tensor.shape[0])
        if start < stop:
            yield Segment(self.tensor, start, 0, stop - start)

    def local_length(self, count: int) -> int:
        return padded_vocabulary(self.tensor.shape[0], count) // count


def is_adapter(parameter: str) -> bool:
    """True if a parameter of a Megatron-Core model is an adapter's, by its name."""
    return parameter.rpartition(".")[2].startswith(ADAPTER_PREFIX)


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """The vocabulary with the rows that make it divisible by tp."""
    return -(-vocabulary // tp) * tp


@dataclass(frozen=True, slots=True)
class GateUp(Cut):
    """Gate and up projection, each cut along the output dimension, then put one after the other."""

    gate: HFTensor
    up: HFTensor

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return (self.gate, self.up)

    def segments(self, shard: Shard) -> Iterator[Segment]:
        start, stop = shard.bounds(self.gate.shape[0])
        yield Segment(self.gate, start, 0, stop - start)
        yield Segment(self.up, start, stop - start, stop - start)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a tensor that belong to heads: of head i those from `first` + i * `step` on.

    Args:
        tensor: whose first dimension has the rows.
        heads: over which ranks cut them.
        rows: of one head.
        first: row of the first head.
        step: rows from one head to the next; 0 for `rows`.
    """

    tensor: HFTensor
    heads: int
    rows: int
    first: int = 0
    step: int = 0

    def segments(self, shard: Shard) -> Iterator[tuple[int, int]]:
        """The first row and the number of rows of each run of the shard."""
        start, stop = shard.bounds(self.heads)
        if self.step in (0, self.rows):
            yield self.first + start * self.rows, (stop - start) * self.rows
        else:
            for head in range(start, stop):
                yield self.first + head * self.step, self.rows


@dataclass(frozen=True, slots=True)
class Sections(Cut):
    """Sections, each cut by heads over the ranks, then put one after the other."""

    sections: tuple[HeadRows, ...]

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return tuple(dict.fromkeys(section.tensor for section in self.sections))

    def segments(self, shard: Shard) -> Iterator[Segment]:
        local = 0
        for section in self.sections:
            for start, length in section.segments(shard):
                yield Segment(section.tensor, start, local, length)
                local += length


@dataclass(frozen=True, slots=True)
class QueryGroups(Cut):
    """Query, key and value, interleaved per query group: the group's query heads, its key head, its value head.

    Where attention has an output gate, the tensor of queries has after each head's rows as many of its gate. The gates
    of a group's heads then come after its query heads.

    The rows of the interleaved matrix are cut evenly. With more ranks than groups a rank has a part of a group, as
    Megatron's attention expects.
    """

    query: HFTensor
    key: HFTensor
    value: HFTensor
    groups: int
    gated: bool = False

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return (self.query, self.key, self.value)

    def segments(self, shard: Shard) -> Iterator[Segment]:
        group_size = sum(tensor.shape[0] // self.groups for tensor in self.tensors)
        start, stop = shard.bounds(group_size * self.groups)
        for group in range(start // group_size, -(-stop // group_size)):
            row = group * group_size
            for tensor, hf_row, size in self._of_group(group):
                first, last = max(row, start), min(row + size, stop)
                if first < last:
                    yield Segment(tensor, hf_row + first - row, first - start, last - first)
                row += size

    def _of_group(self, group: int) -> Iterator[tuple[HFTensor, int, int]]:
        """Runs of a group's rows: a tensor, the first row in it, and the number of rows."""
        for tensor in self.tensors:
            size = tensor.shape[0] // self.groups
            if tensor is self.query and self.gated:
                head = self.key.shape[0] // self.groups
                for first in (0, head):
                    for row in range(group * size + first, (group + 1) * size, 2 * head):
                        yield tensor, row, head
            else:
                yield tensor, group * size, size


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter, or with `{layer}` and `{expert}` in its name one for each layer and local expert.

    Args:
        name: the parameter's name in a model built from Megatron-Core's own layers.
        cut: its composition. Cut over tp, or over etp where the name contains `{expert}`.
        transformer_engine: its name in a model built from Transformer Engine's layers, where that differs.
        transformer_engine_cut: its cut in such a model, where that differs.
        shared: True if it is the same tensor as another rule's parameter: present only where the two lie on different
            pipeline stages, and never written out.
    """

    name: str
    cut: Cut
    transformer_engine: str | None = None
    transformer_engine_cut: Cut | None = None
    shared: bool = False

    @property
    def buffer(self) -> bool:
        return self.cut.tensors[0].buffer

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name

    def local_name(self, transformer_engine: bool, layer: int, expert: int) -> str:
        name = self.transformer_engine if transformer_engine and self.transformer_engine else self.name
        return name.format(layer=layer, expert=expert)

    def local_cut(self, transformer_engine: bool) -> Cut:
        return self.transformer_engine_cut if transformer_engine and self.transformer_engine_cut else self.cut

    def without_fp8(self, layer: int, modules: Collection[str]) -> Rule:
        """The rule in a layer of a model that leaves some modules unquantised."""
        cut, other = self.cut, self.transformer_engine_cut
        return replace(
            self,
            cut=_without_fp8(cut, layer, modules),
            transformer_engine_cut=None if other is None else _without_fp8(other, layer, modules),
        )


def _without_fp8(cut: Cut, layer: int, modules: Collection[str]) -> Cut:
    changes = {
        field.name: replace(tensor, fp8=False)
        for field in fields(cut)  # type: ignore[arg-type]
        if isinstance(tensor := getattr(cut, field.name), HFTensor)
        and module_of(tensor.name).format(layer=layer) in modules
    }
    return replace(cut, **changes) if changes else cut  # type: ignore[type-var]


@dataclass(frozen=True)
class ModelRules:
    """All rules of a model: first stage, each layer, last stage, in the order in which files list the tensors.

    Args:
        first, layers, last: the rules.
        experts: of a layer that has experts.
        layer_costs: `multiplications` of each layer. They balance pipeline stages, also of some of the rules.
        head_cost: the same of the output layer.
        mtp: the rules of a trained layer for multi-token prediction, which files number after the others. It has the
            memory of a model chunk of its own.
    """

    first: tuple[Rule, ...]
    layers: tuple[tuple[Rule, ...], ...]
    last: tuple[Rule, ...]
    experts: int = 0
    layer_costs: tuple[int, ...] = ()
    head_cost: int = 0
    mtp: tuple[Rule, ...] = ()

    @cached_property
    def hf_tensors(self) -> dict[str, HFTensor]:
        """Every tensor of the HuggingFace model by name."""
        tensors: dict[str, HFTensor] = {}
        for layer, rules in [
            (0, self.first),
            *enumerate(self.layers),
            (0, self.last),
            (len(self.layers), self.mtp),
        ]:
            for rule in rules:
                for expert in range(self.experts if rule.per_expert else 1):
                    for template in rule.cut.tensors:
                        tensor = template.at(layer, expert)
                        tensors[tensor.name] = tensor
        return tensors

    def stage_layers(self, layout: Layout) -> tuple[int, ...]:
        """The number of layers of each virtual stage, in the order in which layers pass through them.

        They are the layout's `stages`, or stages that cost about the same (`balanced_stages`).
        """
        if layout.stages is not None:
            return layout.stages
        return balanced_stages(self.layer_costs or (1,) * len(self.layers), self.head_cost, layout.virtual_stages)

    def rank_layers(self, layout: Layout, pp: int) -> tuple[range, ...]:
        """The layers of each model chunk of the ranks of a pipeline stage, numbered as in the HuggingFace model."""
        ends = list(accumulate(counts := self.stage_layers(layout)))
        return tuple(range(ends[stage] - counts[stage], ends[stage]) for stage in range(pp, len(counts), layout.pp))


def multiplications(rules: tuple[Rule, ...], experts_per_token: int) -> int:
    """Multiplications of a token by the matrices of some rules: of experts, by those that the token is routed to."""
    return sum(
        (experts_per_token if rule.per_expert else 1) * prod(tensor.shape)
        for rule in rules
        for tensor in rule.cut.tensors
        if len(tensor.shape) == 2
    )


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of one rank, or a buffer that is part of the model.

    Args:
        name: its name in the rank's Megatron model; of several model chunks, begun with the number of its chunk.
        shape: its local shape.
        slices: location of its elements in the HuggingFace model. Elements in no slice are padding.
        owner: True if this rank, of all that have the same elements, writes them.
        primary: True if it is among the data-parallel copies of which one is the owner. Copies on other tensor-parallel
            ranks or pipeline stages are not.
        buffer: True if it is a float32 buffer and not a parameter.
        chunk: number of its model chunk on the rank.
        count: experts that it stands for, where those of a layer are not listed one by one.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    owner: bool
    primary: bool
    buffer: bool = False
    chunk: int = 0
    count: int = 1


def local_parameters(
    rules: ModelRules,
    layout: Layout,
    coordinates: Coordinates,
    *,
    transformer_engine: bool,
    expert_order: ExpertOrder = "ascending",
    each_expert: bool = True,
) -> list[LocalParameter]:
    """Every parameter of a rank, from shapes alone. The layout must have passed the model's `check_layout`.

    `each_expert`: False lists the experts of a layer once for all, and no `slices`, in a hundredth of the time.
    """
    experts = ExpertNumbering(max(1, rules.experts // layout.ep), expert_order)
    dense = Shard(coordinates.tp, layout.tp, experts)
    expert = Shard(coordinates.etp, layout.etp, experts)
    dense_copy, dense_copies = coordinates.dp * layout.cp + coordinates.cp, layout.dp * layout.cp
    parameters: list[LocalParameter] = []

    def add(rule: Rule, chunk: int, hf_layer: int = 0, local_layer: int = 0) -> None:
        shard = expert if rule.per_expert else dense
        cut = rule.local_cut(transformer_engine)
        shape = cut.local_shape(shard.count)
        copy, copies = (coordinates.edp, layout.edp) if rule.per_expert else (dense_copy, dense_copies)
        # Of all experts alike, of which there are thousands.
        segments = [
            (
                segment.tensor,
                _box(cut, shape, segment.hf_start, segment),
                _box(cut, shape, segment.local_start, segment),
            )
            for segment in (cut.segments(shard) if each_expert else ())
        ]
        count = experts.per_rank if rule.per_expert else 1
        for index in range(count if each_expert else 1):
            hf_expert = experts.hf(coordinates.ep * experts.per_rank + index)
            name = f"{chunk}." * (layout.vpp > 1) + rule.local_name(transformer_engine, local_layer, index)
            # The copies share the writing: a parameter's name says which of them writes it.
            primary = not rule.shared and not (cut.replicated and shard.rank)
            owner = primary and zlib.crc32(name.encode()) % copies == copy
            slices = tuple(
                TensorSlice(
                    tensor.name.format(layer=hf_layer, expert=hf_expert),
                    ((hf_expert, hf_expert + 1), *reversed(hf_box)) if tensor.stacked else hf_box,
                    local_box,
                )
                for tensor, hf_box, local_box in segments
            )
            alike = 1 if each_expert else count
            parameters.append(LocalParameter(name, shape, slices, owner, primary, rule.buffer, chunk, alike))

    for rule in rules.first if coordinates.pp == 0 else ():
        add(rule, 0)
    for chunk, layers in enumerate(rules.rank_layers(layout, coordinates.pp)):
        for local_layer, layer in enumerate(layers):
            for rule in rules.layers[layer]:
                add(rule, chunk, layer, local_layer)
    for rule in rules.last if coordinates.pp == layout.pp - 1 else ():
        if not (rule.shared and layout.pp == 1):
            add(rule, layout.vpp - 1)
    for rule in rules.mtp if coordinates.pp == layout.pp - 1 else ():
        add(rule, layout.vpp, len(rules.layers))
    return parameters


def _box(cut: Cut, local_shape: tuple[int, ...], start: int, segment: Segment) -> Box:
    return tuple(
        (start, start + segment.length) if dimension == cut.axis else (0, size)
        for dimension, size in enumerate(local_shape)
    )
