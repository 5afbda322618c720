"""What a trainer's rank holds: from its parameters, or from shapes alone, laid out as Megatron-Core lays them out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm, prod

import torch

from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import LocalParameter
from engine3d.reshard.shards import Buffer, Holding, Place, Shards

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


def planned_shards(
    spec: ModelSpec, layout: Layout, rank: int, place: Place, dtype: torch.dtype, *, transformer_engine: bool = True
) -> Shards:
    """The shards of a trainer's rank, without a model.

    Memory is that of Megatron-Core's distributed optimizer (DistributedOptimizer._compute_per_buffer_param_layout, one
    bucket a buffer): dense parameters in one buffer, with expert parallelism those of experts in another, the last
    registered first, each on a multiple of 64 elements. What is no parameter has memory of its own.

    Args:
        spec: the model; its expert order is that of the rank's experts.
        layout: of the trainer. It must pass the model's `check_layout`.
        rank: in the layout.
        place: of the rank's memory.
        dtype: of the parameters.
        transformer_engine: whether the model is built from Transformer Engine's layers.
    """
    coordinates = layout.coordinates(rank)
    held = spec.local_parameters(layout, coordinates, transformer_engine=transformer_engine)
    separate_experts = layout.ep > 1 or layout.etp != layout.tp
    dense = [local for local in held if not local.buffer and not (separate_experts and is_expert(local.name))]
    experts = [local for local in held if not local.buffer and separate_experts and is_expert(local.name)]
    tied = spec.sizes.tied and not spec.value_head and layout.pp > 1
    buffers: list[Buffer] = []
    holdings: list[Holding] = []
    for name, parameters, copies in (
        ("dense parameters", dense, layout.dp * layout.cp),
        ("expert parameters", experts, layout.edp),
    ):
        if parameters:
            parameters.sort(key=lambda local: registration_order(local.name))
            laid_out = _laid_out(parameters, lcm(copies, _BUCKET_ALIGNMENT), tied)
            for local, offset in laid_out.places:
                holdings += _holdings(local, len(buffers), offset, _contiguous(local.shape))
            buffers.append(Buffer(name, _name(dtype), (laid_out.elements,)))
    for local in held:
        if local.buffer:
            holdings += _holdings(local, len(buffers), 0, _contiguous(local.shape))
            buffers.append(Buffer(local.name, "float32", local.shape))
    return Shards(f"trainer rank {rank}", rank, place, tuple(buffers), tuple(holdings))


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


def is_expert(name: str) -> bool:
    """Whether a parameter is one of a routed expert's."""
    return ".mlp.experts." in name


def registration_order(name: str) -> tuple[int, ...]:
    """A key that sorts the names of a model's parameters as its `named_parameters` does."""
    key: list[int] = []
    for part in name.split("."):
        numbered = _NUMBERED.fullmatch(part)
        word, number = numbered.groups() if numbered else (part, "")
        key += [_ORDER[word]] if word else []
        key += [int(number)] if number else []
    return tuple(key)


@dataclass(frozen=True, slots=True)
class _LaidOut:
    places: list[tuple[LocalParameter, int]]
    elements: int


def _laid_out(parameters: list[LocalParameter], bucket_alignment: int, tied: bool) -> _LaidOut:
    """Where each parameter starts in a buffer, given in order of registration, and the buffer's length in elements."""
    places: list[tuple[LocalParameter, int]] = []
    end = 0
    for local in reversed(parameters):
        end = _up(end, _PARAMETER_ALIGNMENT)
        # The embedding that another stage shares has a bucket of its own.
        alone = tied and local.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if alone:
            end = _up(end, bucket_alignment)
        places.append((local, end))
        end += prod(local.shape)
        if alone:
            end = _up(end, bucket_alignment)
    return _LaidOut(places, _up(end, bucket_alignment))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _holdings(local: LocalParameter, buffer: int, offset: int, strides: tuple[int, ...]) -> Iterator[Holding]:
    for piece in local.pieces:
        first = offset + sum(start * stride for (start, _), stride in zip(piece.local_box, strides, strict=True))
        yield Holding(piece.hf_name, piece.hf_box, buffer, first, strides)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
