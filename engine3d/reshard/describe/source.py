"""What a trainer's rank holds: from its parameters, or from shapes alone, laid out as Megatron-Core lays them out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod

from engine3d.layout import Coordinates, Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import LocalParameter, ModelRules, local_parameters
from engine3d.reshard.describe.shards import Buffer, Holding, Place, Shards
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
    "embedding",
    "word_embeddings",
    "decoder",
    "layers",
    "input_layernorm",
    "self_attention",
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
_NUMBERED = re.compile(r"(weight|bias|)(\d+)")


class PlannedTrainer:
    """The shards of every rank of a trainer, without a model.

    Memory is that of Megatron-Core's distributed optimizer (DistributedOptimizer._compute_per_buffer_param_layout, one
    bucket a buffer): dense parameters in one buffer, with expert parallelism those of experts in another, the last
    registered first, each on a multiple of 64 elements. What is no parameter has memory of its own.

    Ranks that hold the same share what says so, which makes shards and plans of hundreds of ranks a matter of seconds.

    Args:
        spec: the model; its expert order is that of a rank's experts.
        layout: of the trainer. It must pass the model's `check_layout`.
        dtype: of the parameters.
        transformer_engine: whether the model is built from Transformer Engine's layers.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, dtype: torch.dtype, *, transformer_engine: bool = True) -> None:
        self._spec = spec
        self._layout = layout
        self._dtype = dtype
        self._transformer_engine = transformer_engine
        self._tied = tied_stages(spec, layout)
        self._dense, self._experts = buffer_rules(spec.rules, layout)
        self._dense_parts: dict[tuple[int, int], _Part] = {}
        self._expert_parts: dict[tuple[int, int, int], _Part] = {}

    def shards(self, rank: int, place: Place) -> Shards:
        """The shards of one rank."""
        at = self._layout.coordinates(rank)
        if (at.tp, at.pp) not in self._dense_parts:
            copies = self._layout.dp * self._layout.cp
            self._dense_parts[at.tp, at.pp] = self._part("dense parameters", self._dense, at, copies, 0)
        part = self._dense_parts[at.tp, at.pp]
        if self._experts is not None:
            key = at.etp, at.ep, at.pp
            if key not in self._expert_parts:
                first = len(part.buffers)
                own = self._part("expert parameters", self._experts, at, self._layout.edp, first)
                self._expert_parts[key] = own
            part += self._expert_parts[key]
        return Shards(f"trainer rank {rank}", rank, place, part.buffers, part.holdings)

    def _part(self, name: str, rules: ModelRules, at: Coordinates, copies: int, first: int) -> _Part:
        """What a rank holds by some of the rules: parameters in one buffer, and others. Buffers count from `first`."""
        held = local_parameters(
            rules,
            self._layout,
            at,
            transformer_engine=self._transformer_engine,
            expert_order=self._spec.expert_order,
        )
        parameters = [each for each in held if not each.buffer]
        laid_out = parameter_buffer(parameters, copies, tied=self._tied)
        buffers = [Buffer(name, _name(self._dtype), (laid_out.elements,))] if parameters else []
        holdings: list[Holding] = []
        for local, offset in laid_out.places:
            holdings += _holdings(local, first, offset, contiguous_strides(local.shape))
        for local in held:
            if local.buffer:
                holdings += _holdings(local, first + len(buffers), 0, contiguous_strides(local.shape))
                buffers.append(Buffer(local.name, "float32", local.shape))
        return _Part(tuple(buffers), tuple(holdings))


def planned_shards(
    spec: ModelSpec, layout: Layout, rank: int, place: Place, dtype: torch.dtype, *, transformer_engine: bool = True
) -> Shards:
    """The shards of one rank of a trainer, as `PlannedTrainer` has them."""
    return PlannedTrainer(spec, layout, dtype, transformer_engine=transformer_engine).shards(rank, place)


def model_shards(
    parameters: Iterable[tuple[LocalParameter, torch.Tensor]], name: str, rank: int, place: Place
) -> tuple[Shards, list[torch.UntypedStorage]]:
    """The shards of a trainer's rank as its parameters lie in memory, and the memory.

    Args:
        parameters: of the rank, each with what its rule says of it (`rank_parameters`).
        name: how errors call the rank.
        rank: its number among the sources.
        place: of its memory.

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
    return Shards(name, rank, place, tuple(buffers), tuple(holdings)), storages


def registration_order(name: str) -> tuple[int, ...]:
    """A key that sorts the names of a model's parameters as its `named_parameters` does.

    A number after a word is that of an expert in one of Transformer Engine's grouped layers, as they are used here
    (`models.transformer_engine_modules`): the last comes first.
    """
    key: list[int] = []
    for part in name.split("."):
        numbered = _NUMBERED.fullmatch(part)
        word, number = numbered.groups() if numbered else (part, "")
        key += [_ORDER[word]] if word else []
        key += [-int(number) if word else int(number)] if number else []
    return tuple(key)


def buffer_rules(rules: ModelRules, layout: Layout) -> tuple[ModelRules, ModelRules | None]:
    """The rules of each of the two buffers: of dense layers, and of experts where these are cut over other ranks."""
    if layout.ep == 1 and layout.etp == layout.tp:
        return rules, None
    dense = tuple(tuple(rule for rule in layer if not rule.per_expert) for layer in rules.layers)
    experts = tuple(tuple(rule for rule in layer if rule.per_expert) for layer in rules.layers)
    return replace(rules, layers=dense), replace(rules, first=(), layers=experts, last=())


def tied_stages(spec: ModelSpec, layout: Layout) -> bool:
    """Whether the first and the last stage have a copy each of one embedding."""
    return spec.sizes.tied and not spec.value_head and layout.pp > 1


@dataclass(frozen=True, slots=True)
class ParameterBuffer:
    """A buffer of parameters.

    Args:
        places: each parameter with the element at which it starts.
        elements: of the buffer, padding included.
        buckets: ranges of elements. Each is cut evenly over the ranks that have the buffer: what of it is a rank's own
            in the optimizer.
    """

    places: tuple[tuple[LocalParameter, int], ...]
    elements: int
    buckets: tuple[tuple[int, int], ...]


def parameter_buffer(parameters: Iterable[LocalParameter], copies: int, *, tied: bool) -> ParameterBuffer:
    """The buffer of a rank's parameters.

    Args:
        parameters: those that share a buffer, in any order.
        copies: ranks that have the same buffer.
        tied: `tied_stages`.
    """
    bucket_alignment = lcm(copies, _BUCKET_ALIGNMENT)
    places: list[tuple[LocalParameter, int]] = []
    bounds = {0}
    end = 0
    for local in sorted(parameters, key=lambda each: registration_order(each.name), reverse=True):
        end = _up(end, _PARAMETER_ALIGNMENT)
        # The embedding that another stage shares has a bucket of its own.
        alone = tied and local.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if alone:
            end = _up(end, bucket_alignment)
            bounds.add(end)
        places.append((local, end))
        end += prod(local.shape)
        if alone:
            end = _up(end, bucket_alignment)
            bounds.add(end)
    end = _up(end, bucket_alignment)
    return ParameterBuffer(tuple(places), end, tuple(pairwise(sorted(bounds | {end}))))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of a rank's memory."""

    buffers: tuple[Buffer, ...]
    holdings: tuple[Holding, ...]

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.buffers + other.buffers, self.holdings + other.holdings)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _holdings(local: LocalParameter, buffer: int, offset: int, strides: tuple[int, ...]) -> Iterator[Holding]:
    for piece in local.pieces:
        first = offset + sum(start * stride for (start, _), stride in zip(piece.local_box, strides, strict=True))
        yield Holding(piece.hf_name, piece.hf_box, buffer, first, strides)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
