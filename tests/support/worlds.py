"""Trainers and engines of small models from shapes alone, their memory filled, and plans carried out on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.models.rules import Box
from engine3d.reshard.describe.shards import Alias, Buffer, Holding, Location, RankShards
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.reshard.plan.transfers import Plan

Memory = list[NDArray[np.float64]]


def location(rank: int, gpus_per_node: int = 4, first_node: int = 0) -> Location:
    node, device = divmod(rank, gpus_per_node)
    return Location(f"node {first_node + node}", f"gpu {device}")


def trainer(
    spec: ModelSpec, layout: Layout, *, gpus_per_node: int = 4, transformer_engine: bool = True
) -> list[RankShards]:
    planned = PlannedTrainer(spec, layout, torch.bfloat16, transformer_engine=transformer_engine)
    return [planned.shards(rank, location(rank, gpus_per_node)) for rank in range(layout.world_size)]


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in spec.hf_tensors.items()}


@dataclass
class _Parameters:
    """An engine rank's memory while it is described."""

    buffers: list[Buffer]
    holdings: list[Holding]

    def add(self, name: str, shape: tuple[int, ...], boxes: Iterable[tuple[str, Box, tuple[int, ...]]]) -> None:
        """A parameter that holds boxes of tensors, each from a start in the parameter on."""
        strides = tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        for tensor, box, start in boxes:
            offset = sum(index * stride for index, stride in zip(start, strides, strict=True))
            self.holdings.append(Holding(tensor, box, len(self.buffers), offset, strides[-len(box) :]))
        self.buffers.append(Buffer(name, "bfloat16", shape))


def engine_rank(spec: ModelSpec, tp: int, ep: int, rank: int) -> tuple[tuple[Buffer, ...], tuple[Holding, ...]]:
    """Return the buffers of an engine's rank, fused as inference engines do, and what they hold.

    q, k and v in one parameter (a key head whole on several ranks where there are fewer), gate and up in one, all
    experts of a rank in one. The experts are cut over ep, each expert over tp / ep. The vocabulary is padded.
    """
    sizes, parameters = spec.sizes, _Parameters([], [])
    hidden = sizes.hidden

    def vocabulary(name: str, tensor: str) -> None:
        rows = -(-sizes.vocabulary // tp)
        first, last = min(rank * rows, sizes.vocabulary), min((rank + 1) * rows, sizes.vocabulary)
        boxes = [(tensor, ((first, last), (0, hidden)), (0, 0))] if first < last else []
        parameters.add(name, (rows, hidden), boxes)

    def gated(name: str, hf: str, ffn: int) -> None:
        width = ffn // tp
        cut = (rank * width, (rank + 1) * width)
        pairs = [(f"{hf}.gate_proj", 0), (f"{hf}.up_proj", width)]
        boxes = [(f"{tensor}.weight", (cut, (0, hidden)), (start, 0)) for tensor, start in pairs]
        parameters.add(f"{name}.gate_up", (2 * width, hidden), boxes)
        parameters.add(f"{name}.down", (hidden, width), [(f"{hf}.down_proj.weight", ((0, hidden), cut), (0, 0))])

    def replicated(tensor: str) -> None:
        shape = spec.hf_shape(tensor)
        parameters.add(tensor, shape, [(tensor, tuple((0, size) for size in shape), (0,) * len(shape))])

    vocabulary("embed_tokens", "model.embed_tokens.weight")
    for layer in range(sizes.layers):
        hf = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            replicated(f"{hf}{norm}.weight")
        if sizes.qk_norm:
            replicated(f"{hf}self_attn.q_norm.weight")
            replicated(f"{hf}self_attn.k_norm.weight")
        queries, copies = sizes.heads * sizes.head_dim // tp, max(1, tp // sizes.groups)
        keys = sizes.groups * sizes.head_dim * copies // tp
        query = (rank * queries, (rank + 1) * queries)
        key = (rank // copies * keys, (rank // copies + 1) * keys)
        starts = [("q", query, 0), ("k", key, queries), ("v", key, queries + keys)]
        boxes = [
            (f"{hf}self_attn.{projection}_proj.weight", (rows, (0, hidden)), (at, 0)) for projection, rows, at in starts
        ]
        parameters.add(f"{hf}qkv", (queries + 2 * keys, hidden), boxes)
        parameters.add(f"{hf}o", (hidden, queries), [(f"{hf}self_attn.o_proj.weight", ((0, hidden), query), (0, 0))])
        if not sizes.is_sparse(layer):
            gated(f"{hf}mlp", f"{hf}mlp", sizes.ffn)
            continue
        replicated(f"{hf}mlp.gate.weight")
        count, within = sizes.experts // ep, tp // ep
        expert_width = sizes.expert_ffn // within
        cut = (rank % within * expert_width, (rank % within + 1) * expert_width)
        experts = [(local, f"{hf}mlp.experts.{rank // within * count + local}.") for local in range(count)]
        gate_up = [
            (f"{name}{half}_proj.weight", (cut, (0, hidden)), (local, start, 0))
            for local, name in experts
            for half, start in (("gate", 0), ("up", expert_width))
        ]
        parameters.add(f"{hf}w13", (count, 2 * expert_width, hidden), gate_up)
        down = [(f"{name}down_proj.weight", ((0, hidden), cut), (local, 0, 0)) for local, name in experts]
        parameters.add(f"{hf}w2", (count, hidden, expert_width), down)
    replicated("model.norm.weight")
    if not sizes.tied:
        vocabulary("lm_head", "lm_head.weight")
    return tuple(parameters.buffers), tuple(parameters.holdings)


def engines(
    spec: ModelSpec, tp: int, ep: int, count: int = 1, *, gpus_per_node: int = 4, first_node: int = 0
) -> list[RankShards]:
    """The ranks of several engines. On the trainer's nodes from the first on, unless they begin at a later node."""
    ranks = [engine_rank(spec, tp, ep, rank) for rank in range(tp)]
    return [
        RankShards(
            f"engine {index // tp} rank {index % tp}",
            index,
            location(index, gpus_per_node, first_node),
            *ranks[index % tp],
        )
        for index in range(tp * count)
    ]


def with_aliases(target: RankShards, aliases: tuple[Alias, ...]) -> RankShards:
    return replace(target, aliases=aliases)


def full_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float64]]:
    """Tensors in which no two elements are equal."""
    tensors, first = {}, 1
    for name, shape in shapes.items():
        tensors[name] = np.arange(first, first + prod(shape), dtype=np.float64).reshape(shape)
        first += prod(shape)
    return tensors


def memory_of(rank: RankShards, tensors: dict[str, NDArray[np.float64]] | None) -> Memory:
    """The rank's buffers, with the tensors in its holdings or with nothing, and -1 everywhere else."""
    memory = [np.full(buffer.elements, -1.0) for buffer in rank.buffers]
    for holding in rank.holdings if tensors is not None else ():
        assert tensors is not None
        view = _view(memory, holding)
        view[...] = tensors[holding.tensor][tuple(slice(*span) for span in holding.box)]
    return memory


def _view(memory: Memory, holding: Holding) -> NDArray[np.float64]:
    sizes = [stop - start for start, stop in holding.box]
    return _strided(memory[holding.buffer], holding.offset, sizes, holding.strides)


def _strided(
    buffer: NDArray[np.float64], offset: int, shape: Sequence[int], strides: Sequence[int]
) -> NDArray[np.float64]:
    """View elements of a buffer, all of which must lie in it. NumPy's `as_strided` takes ten times as long."""
    size = buffer.itemsize
    return np.ndarray(shape, buffer.dtype, buffer, offset * size, [stride * size for stride in strides])


def carry_out(plan: Plan, sources: Sequence[Memory], targets: Sequence[Memory]) -> None:
    """Copy every segment. Nothing may be written twice."""
    for transfer in plan.transfers:
        segments = transfer.segments
        columns = [getattr(segments, column.name).tolist() for column in fields(segments)]
        for *source_row, buffer, offset, stride, rows, length in zip(*columns, strict=True):
            source_buffer, source_offset, source_stride = source_row
            assert rows == 1 or abs(stride) >= length
            source = _strided(
                sources[transfer.source][source_buffer], source_offset, (rows, length), (source_stride, 1)
            )
            target = _strided(targets[transfer.target][buffer], offset, (rows, length), (stride, 1))
            assert (target == -1).all()
            target[...] = source


def bound(alias: Alias, shape: tuple[int, ...], sources: Sequence[Memory]) -> NDArray[np.float64]:
    """Return the contents of an aliased buffer."""
    return _strided(sources[alias.source_rank][alias.source_buffer], alias.offset, shape, alias.strides).ravel()


def check(
    plan: Plan, sources: Sequence[RankShards], targets: Sequence[RankShards], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Every element of every target is what it should be, padding is untouched, and no byte moves that need not."""
    tensors = full_tensors(shapes)
    source_memory = [memory_of(source, tensors) for source in sources]
    target_memory = [memory_of(target, None) for target in targets]
    carry_out(plan, source_memory, target_memory)
    needed = 0
    for target, memory in zip(targets, target_memory, strict=True):
        aliased = {alias.target_buffer: alias for alias in target.aliases}
        for number, expected in enumerate(memory_of(target, tensors)):
            if number in aliased:
                assert (memory[number] == -1).all()
                values = bound(aliased[number], target.buffers[number].shape, source_memory)
            else:
                values = memory[number]
                needed += int((expected != -1).sum()) * target.buffers[number].itemsize
            assert (values == expected).all(), (target.name, target.buffers[number].name)
    assert plan.bytes_moved == plan.bytes_needed == needed
