"""Shards of a trainer's rank: from its parameters, or from shapes alone, laid out as Megatron-Core lays them out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise
from math import lcm, prod

from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import LocalParameter, ModelRules, local_parameters
from engine3d.reshard.describe.shards import Buffer, Holding, Location, RankShards
from engine3d.reshard.describe.strided import contiguous_strides
from engine3d.startup.lazy_imports import torch

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128

# Modules and parameters of a Megatron-Core model in the order in which their parents register them; a module's own
# parameters come before those of its children.
_REGISTERED = (
    "layer_norm_weight",
    "weight",
    "bias",
    "gate_weight",
    "dt_bias",
    "A_log",
    "lora_A",
    "lora_B",
    "embedding",
    "word_embeddings",
    "mtp",
    "enorm",
    "hnorm",
    "eh_proj",
    "mtp_model_layer",
    "decoder",
    "layers",
    "input_layernorm",
    "self_attention",
    "core_attention",
    "softmax_offset",
    "linear_proj",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_qkv",
    "q_layernorm",
    "kv_layernorm",
    "k_layernorm",
    "query_norm",
    "key_norm",
    "in_proj",
    "conv1d",
    "out_norm",
    "out_proj",
    "pre_mlp_layernorm",
    "mlp",
    "router",
    "experts",
    "local_experts",
    "shared_experts",
    "linear_fc1",
    "linear_fc2",
    "final_layernorm",
    "output_layer",
)
_ORDER = {name: number for number, name in enumerate(_REGISTERED)}
_NUMBERED = re.compile(r"(weight|bias|lora_A|lora_B|)(\d+)")


class PlannedTrainer:
    """The shards of every rank of a trainer, without a model.

    Memory is that of Megatron-Core's distributed optimizer (DistributedOptimizer._compute_per_buffer_param_layout, one
    bucket a buffer): a model chunk's dense parameters in one buffer, with expert parallelism those of experts in
    another, the last registered first, each on a multiple of 64 elements. Tensors that are no parameters have memory of
    their own.

    Ranks that hold the same share one description, which makes shards and plans of hundreds of ranks in seconds.

    Args:
        spec: the model; its expert order is that of a rank's experts.
        layout: of the trainer. It must pass the model's `check_layout`.
        dtype: of the parameters.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, dtype: torch.dtype, *, transformer_engine: bool = True) -> None:
        self._spec = spec
        self._layout = layout
        self._dtype = dtype
        self._transformer_engine = transformer_engine
        self._tied = tied_stages(spec, layout)
        self._dense, self._experts = buffer_rules(spec.rules, layout)
        self._dense_sections: dict[tuple[int, int], _MemorySection] = {}
        self._expert_sections: dict[tuple[int, int, int], _MemorySection] = {}

    def shards(self, rank: int, location: Location) -> RankShards:
        """The shards of one rank."""
        at = self._layout.coordinates(rank)
        if (at.tp, at.pp) not in self._dense_sections:
            copies = self._layout.dp * self._layout.cp
            self._dense_sections[at.tp, at.pp] = self._section("dense parameters", self._dense, at, copies, 0)
        section = self._dense_sections[at.tp, at.pp]
        if self._experts is not None:
            key = at.etp, at.ep, at.pp
            if key not in self._expert_sections:
                first = len(section.buffers)
                experts = self._section("expert parameters", self._experts, at, self._layout.edp, first)
                self._expert_sections[key] = experts
            section += self._expert_sections[key]
        return RankShards(f"trainer rank {rank}", rank, location, section.buffers, section.holdings)

    def _section(self, name: str, rules: ModelRules, at: Coordinates, copies: int, first: int) -> _MemorySection:
        """Lay out what some rules give a rank: parameters in one buffer, and others. Buffers count from `first`."""
        local_tensors = local_parameters(
            rules,
            self._layout,
            at,
            transformer_engine=self._transformer_engine,
            expert_order=self._spec.expert_order,
        )
        buffers: list[Buffer] = []
        holdings: list[Holding] = []
        for laid_out in parameter_buffers(local_tensors, copies, tied=self._tied):
            for local, offset in laid_out.starts:
                holdings += _holdings(local, first + len(buffers), offset, contiguous_strides(local.shape))
            buffers.append(Buffer(name, _name(self._dtype), (laid_out.elements,)))
        for local in local_tensors:
            if local.buffer:
                holdings += _holdings(local, first + len(buffers), 0, contiguous_strides(local.shape))
                buffers.append(Buffer(local.name, "float32", local.shape))
        return _MemorySection(tuple(buffers), tuple(holdings))


def planned_shards(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    location: Location,
    dtype: torch.dtype,
    *,
    transformer_engine: bool = True,
) -> RankShards:
    """The shards of one rank of a trainer, as `PlannedTrainer` has them."""
    return PlannedTrainer(spec, layout, dtype, transformer_engine=transformer_engine).shards(rank, location)


def model_shards(
    parameters: Iterable[tuple[LocalParameter, torch.Tensor]], name: str, rank: int, location: Location
) -> tuple[RankShards, list[torch.UntypedStorage]]:
    """The shards of a trainer's rank as its parameters lie in memory, and the memory.

    Args:
        parameters: of the rank, each with its rule (`rank_parameters`).
        name: how errors call the rank.
        rank: its number among the sources.
        location: of its memory.

    Returns:
        The shards, one buffer for each distinct storage (and dtype), and the storages in the order of the buffers.
    """
    numbers: dict[tuple[int, torch.dtype], int] = {}
    buffers: list[Buffer] = []
    storages: list[torch.UntypedStorage] = []
    holdings: list[Holding] = []
    for local, tensor in parameters:
        storage = tensor.untyped_storage()
        number = numbers.setdefault((storage.data_ptr(), tensor.dtype), len(buffers))
        if number == len(buffers):
            shape = (storage.nbytes() // tensor.dtype.itemsize,)
            buffers.append(Buffer(f"memory of {local.name}", _name(tensor.dtype), shape))
            storages.append(storage)
        holdings += _holdings(local, number, int(tensor.storage_offset()), tensor.stride())
    return RankShards(name, rank, location, tuple(buffers), tuple(holdings)), storages


@cache
def registration_order(name: str) -> tuple[int, ...]:
    """A key that sorts the names of a model's parameters as its `named_parameters` does.

    A number after a word is that of an expert in one of Transformer Engine's grouped layers, as they are used here
    (`models.transformer_engine_modules`): the last comes first.
    """
    key: list[int] = []
    for component in name.split("."):
        numbered = _NUMBERED.fullmatch(component)
        word, number = numbered.groups() if numbered else (component, "")
        key += [_ORDER[word]] if word else []
        key += [-int(number) if word else int(number)] if number else []
    return tuple(key)


def buffer_rules(rules: ModelRules, layout: Layout) -> tuple[ModelRules, ModelRules | None]:
    """The rules of each of the two buffers: of dense layers, and of experts where these are cut over other ranks."""
    if layout.ep == 1 and layout.etp == layout.tp:
        return rules, None
    *dense, dense_mtp = (tuple(rule for rule in layer if not rule.per_expert) for layer in (*rules.layers, rules.mtp))
    *experts, mtp_experts = (tuple(rule for rule in layer if rule.per_expert) for layer in (*rules.layers, rules.mtp))
    return (
        replace(rules, layers=tuple(dense), mtp=dense_mtp),
        replace(rules, first=(), layers=tuple(experts), last=(), mtp=mtp_experts),
    )


def tied_stages(spec: ModelSpec, layout: Layout) -> bool:
    """True if the first and the last stage have a copy each of one embedding."""
    return spec.sizes.tied and not spec.value_head and layout.pp > 1


@dataclass(frozen=True, slots=True)
class ParameterBuffer:
    """A buffer of parameters.

    Args:
        starts: each parameter with the element at which it starts.
        elements: of the buffer, padding included.
        buckets: ranges of elements. Each is cut evenly over the ranks that have the buffer: a rank's optimizer owns
            one share.
    """

    starts: tuple[tuple[LocalParameter, int], ...]
    elements: int
    buckets: tuple[tuple[int, int], ...]


def parameter_buffers(local_tensors: Iterable[LocalParameter], copies: int, *, tied: bool) -> list[ParameterBuffer]:
    """The buffers of a rank's parameters: one for each model chunk that has any.

    Args:
        local_tensors: those that share the buffer of their chunk, chunk by chunk. Tensors that are no parameters are in
            none.
        copies: ranks that have the same buffers.
        tied: `tied_stages`.
    """
    parameters = [local for local in local_tensors if not local.buffer]
    return [_chunk_buffer(chunk, copies, tied) for _, chunk in groupby(parameters, key=lambda local: local.chunk)]


def unpadded_elements(parameters: Iterable[LocalParameter], copies: int) -> int | None:
    """Elements of all buffers of a rank's parameters; None where one of these is padded, which its place decides."""
    by_chunk = Counter[int]()
    for local in parameters:
        if (elements := prod(local.shape)) % _PARAMETER_ALIGNMENT:
            return None
        by_chunk[local.chunk] += local.count * elements
    alignment = lcm(copies, _BUCKET_ALIGNMENT)
    return sum(_up(elements, alignment) for elements in by_chunk.values())


def _chunk_buffer(parameters: Iterable[LocalParameter], copies: int, tied: bool) -> ParameterBuffer:
    bucket_alignment = lcm(copies, _BUCKET_ALIGNMENT)
    starts: list[tuple[LocalParameter, int]] = []
    bounds = {0}
    end = 0
    for local in sorted(parameters, key=lambda parameter: registration_order(parameter.name), reverse=True):
        end = _up(end, _PARAMETER_ALIGNMENT)
        # The embedding that another stage shares has a bucket of its own.
        alone = tied and local.name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))
        if alone:
            end = _up(end, bucket_alignment)
            bounds.add(end)
        starts.append((local, end))
        end += prod(local.shape)
        if alone:
            end = _up(end, bucket_alignment)
            bounds.add(end)
    end = _up(end, bucket_alignment)
    return ParameterBuffer(tuple(starts), end, tuple(pairwise(sorted(bounds | {end}))))


@dataclass(frozen=True, slots=True)
class _MemorySection:
    """A range of a rank's memory."""

    buffers: tuple[Buffer, ...]
    holdings: tuple[Holding, ...]

    def __add__(self, other: _MemorySection) -> _MemorySection:
        return _MemorySection(self.buffers + other.buffers, self.holdings + other.holdings)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _holdings(local: LocalParameter, buffer: int, offset: int, strides: tuple[int, ...]) -> Iterator[Holding]:
    for region in local.slices:
        first = offset + sum(start * stride for (start, _), stride in zip(region.local_box, strides, strict=True))
        yield Holding(region.hf_name, region.hf_box, buffer, first, region.strides(strides))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
