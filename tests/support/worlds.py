"""Trainers and engines of small models from shapes alone, their memory filled, and plans carried out on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.models.rules import Box
from engine3d.reshard.describe.shards import Alias, Buffer, Holding, Place, Shards
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.reshard.plan.pieces import Plan

Memory = list[NDArray[np.float64]]


def place(rank: int, gpus_per_node: int = 4, first_node: int = 0) -> Place:
    node, device = divmod(rank, gpus_per_node)
    return Place(f"node {first_node + node}", f"gpu {device}")


def trainer(
    spec: ModelSpec, layout: Layout, *, gpus_per_node: int = 4, transformer_engine: bool = True
) -> list[Shards]:
    planned = PlannedTrainer(spec, layout, torch.bfloat16, transformer_engine=transformer_engine)
    return [planned.shards(rank, place(rank, gpus_per_node)) for rank in range(layout.world_size)]


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
    """What a rank of an engine holds, fused as inference engines do.

    q, k and v in one parameter (a key head whole on several ranks where there are fewer), gate and up in one, all
    experts of a rank in one. The experts are cut over ep, each expert over tp / ep. The vocabulary is padded.
    """
    sizes, held = spec.sizes, _Parameters([], [])
    hidden = sizes.hidden

    def vocabulary(name: str, tensor: str) -> None:
        rows = -(-sizes.vocabulary // tp)
        first, last = min(rank * rows, sizes.vocabulary), min((rank + 1) * rows, sizes.vocabulary)
        boxes = [(tensor, ((first, last), (0, hidden)), (0, 0))] if first < last else []
        held.add(name, (rows, hidden), boxes)

    def gated(name: str, hf: str, ffn: int) -> None:
        part = ffn // tp
        cut = (rank * part, (rank + 1) * part)
        pairs = [(f"{hf}.gate_proj", 0), (f"{hf}.up_proj", part)]
        boxes = [(f"{tensor}.weight", (cut, (0, hidden)), (start, 0)) for tensor, start in pairs]
        held.add(f"{name}.gate_up", (2 * part, hidden), boxes)
        held.add(f"{name}.down", (hidden, part), [(f"{hf}.down_proj.weight", ((0, hidden), cut), (0, 0))])

    def whole(tensor: str) -> None:
        shape = spec.hf_shape(tensor)
        held.add(tensor, shape, [(tensor, tuple((0, size) for size in shape), (0,) * len(shape))])

    vocabulary("embed_tokens", "model.embed_tokens.weight")
    for layer in range(sizes.layers):
        hf = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            whole(f"{hf}{norm}.weight")
        if sizes.qk_norm:
            whole(f"{hf}self_attn.q_norm.weight")
            whole(f"{hf}self_attn.k_norm.weight")
        queries, copies = sizes.heads * sizes.head_dim // tp, max(1, tp // sizes.groups)
        keys = sizes.groups * sizes.head_dim * copies // tp
        query = (rank * queries, (rank + 1) * queries)
        key = (rank // copies * keys, (rank // copies + 1) * keys)
        starts = [("q", query, 0), ("k", key, queries), ("v", key, queries + keys)]
        boxes = [(f"{hf}self_attn.{each}_proj.weight", (rows, (0, hidden)), (at, 0)) for each, rows, at in starts]
        held.add(f"{hf}qkv", (queries + 2 * keys, hidden), boxes)
        held.add(f"{hf}o", (hidden, queries), [(f"{hf}self_attn.o_proj.weight", ((0, hidden), query), (0, 0))])
        if not sizes.is_sparse(layer):
            gated(f"{hf}mlp", f"{hf}mlp", sizes.ffn)
            continue
        whole(f"{hf}mlp.gate.weight")
        count, within = sizes.experts // ep, tp // ep
        part = sizes.expert_ffn // within
        cut = (rank % within * part, (rank % within + 1) * part)
        experts = [(local, f"{hf}mlp.experts.{rank // within * count + local}.") for local in range(count)]
        gate_up = [
            (f"{name}{half}_proj.weight", (cut, (0, hidden)), (local, start, 0))
            for local, name in experts
            for half, start in (("gate", 0), ("up", part))
        ]
        held.add(f"{hf}w13", (count, 2 * part, hidden), gate_up)
        down = [(f"{name}down_proj.weight", ((0, hidden), cut), (local, 0, 0)) for local, name in experts]
        held.add(f"{hf}w2", (count, hidden, part), down)
    whole("model.norm.weight")
    if not sizes.tied:
        vocabulary("lm_head", "lm_head.weight")
    return tuple(held.buffers), tuple(held.holdings)


def engines(
    spec: ModelSpec, tp: int, ep: int, count: int = 1, *, gpus_per_node: int = 4, first_node: int = 0
) -> list[Shards]:
    """The ranks of several engines. On the trainer's nodes from the first on, unless they begin at a later node."""
    ranks = [engine_rank(spec, tp, ep, rank) for rank in range(tp)]
    return [
        Shards(
            f"engine {index // tp} rank {index % tp}",
            index,
            place(index, gpus_per_node, first_node),
            *ranks[index % tp],
        )
        for index in range(tp * count)
    ]


def with_aliases(target: Shards, aliases: tuple[Alias, ...]) -> Shards:
    return replace(target, aliases=aliases)


def full_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float64]]:
    """Tensors in which no two elements are equal."""
    found, first = {}, 1
    for name, shape in shapes.items():
        found[name] = np.arange(first, first + prod(shape), dtype=np.float64).reshape(shape)
        first += prod(shape)
    return found


def memory_of(rank: Shards, tensors: dict[str, NDArray[np.float64]] | None) -> Memory:
    """The rank's buffers, with the tensors in its holdings or with nothing, and -1 everywhere else."""
    memory = [np.full(buffer.elements, -1.0) for buffer in rank.buffers]
    for holding in rank.holdings if tensors is not None else ():
        assert tensors is not None
        view = _view(memory, holding)
        view[...] = tensors[holding.tensor][tuple(slice(*span) for span in holding.box)]
    return memory


def _view(memory: Memory, holding: Holding) -> NDArray[np.float64]:
    buffer = memory[holding.buffer][holding.offset :]
    sizes = [stop - start for start, stop in holding.box]
    return np.lib.stride_tricks.as_strided(buffer, sizes, [stride * buffer.itemsize for stride in holding.strides])


def carry_out(plan: Plan, sources: Sequence[Memory], targets: Sequence[Memory]) -> None:
    """Copy every piece, element by element. Nothing may be written twice."""
    for transfer in plan.transfers:
        pieces = transfer.pieces
        for index in range(len(pieces)):
            source = sources[transfer.source][pieces.source_buffer[index]]
            target = targets[transfer.target][pieces.target_buffer[index]]
            for row in range(pieces.rows[index]):
                from_, to = (
                    offset[index] + row * stride[index]
                    for offset, stride in (
                        (pieces.source_offset, pieces.source_stride),
                        (pieces.target_offset, pieces.target_stride),
                    )
                )
                length = pieces.length[index]
                assert (target[to : to + length] == -1).all()
                target[to : to + length] = source[from_ : from_ + length]


def bound(alias: Alias, shape: tuple[int, ...], sources: Sequence[Memory]) -> NDArray[np.float64]:
    """What an aliased buffer holds."""
    buffer = sources[alias.source_rank][alias.source_buffer][alias.offset :]
    return np.lib.stride_tricks.as_strided(
        buffer, shape, [stride * buffer.itemsize for stride in alias.strides]
    ).ravel()


def check(plan: Plan, sources: Sequence[Shards], targets: Sequence[Shards], shapes: dict[str, tuple[int, ...]]) -> None:
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
                found = bound(aliased[number], target.buffers[number].shape, source_memory)
            else:
                found = memory[number]
                needed += int((expected != -1).sum()) * target.buffers[number].itemsize
            assert (found == expected).all(), (target.name, target.buffers[number].name)
    assert plan.bytes_moved == plan.bytes_needed == needed
