"""Adapter of an engine's rank: the elements of A and B in the memory pool of SGLang's LoRA.

SGLang cuts B as the rows of the weight that it belongs to, and A as its columns. So the trace of the weights says where
adapters lie, whatever the layer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine3d.errors import EngineError
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import A, B, module_name
from engine3d.reshard.describe.shards import Buffer, Holding
from engine3d.reshard.describe.trace import LoadTrace


def resident_adapter(manager: Any) -> tuple[str, int]:
    """SGLang's name of an engine's adapter, and its slot in the pool, where it stays.

    Args:
        manager: SGLang's `LoRAManager`, with one adapter, which is pinned.

    Raises:
        EngineError: it has another number of adapters, or the adapter may be evicted.
    """
    references = list(manager.lora_refs.values())
    if len(references) != 1 or not references[0].pinned:
        raise EngineError(f"SGLang has {len(references)} adapters, expected one that is pinned")
    name = references[0].lora_id
    manager.fetch_new_loras({name})
    return name, int(manager.memory_pool.get_buffer_id(name))


def adapter_trace(manager: Any, weights: LoadTrace) -> LoadTrace:
    """The elements of the adapter in the pool of one rank.

    Args:
        manager: SGLang's `LoRAManager`, as `resident_adapter` takes it.
        weights: the trace of the model's weights.

    Returns:
        A buffer for each A and each B of the pool. Elements of other slots, and of layers of a fused one that have no
        adapter, are in no holding.

    Raises:
        EngineError: SGLang has A or B of a layer in another shape.
    """
    from sglang.srt.lora.utils import LoRAType, get_target_module_name

    name, slot = resident_adapter(manager)
    targets, pool = manager.configs[name].target_modules, manager.memory_pool
    rank = pool.max_lora_rank
    of_buffer = {buffer.name: number for number, buffer in enumerate(weights.buffers)}
    buffers: list[Buffer] = []
    tensors: list[Tensor] = []
    holdings: list[Holding] = []
    for layer, modules in enumerate(manager.lora_modules):
        for module in modules:
            number = of_buffer[f"{module}.weight"]
            rows, columns = weights.buffers[number].shape
            weight = [holding for holding in weights.holdings if holding.buffer == number]
            fused = list(dict.fromkeys(holding.tensor for holding in weight))
            target = get_target_module_name(module, pool.target_modules)
            for kind, of_pool, shape in (
                (A, LoRAType.LORA_A, (len(fused) * rank, columns)),
                (B, LoRAType.LORA_B, (rows, rank)),
            ):
                tensor = pool.get_tensor(target, layer, of_pool)
                if tuple(tensor.shape[1:]) != shape:
                    raise EngineError(
                        f"{kind} of {module} has the shape {list(tensor.shape[1:])} in SGLang, expected {list(shape)}"
                    )
                dtype = str(tensor.dtype).removeprefix("torch.")
                buffers.append(Buffer(f"{module}.{kind}", dtype, tuple(tensor.shape)))
                tensors.append(tensor)
            of_a: list[Holding] = []
            of_b: list[Holding] = []
            for holding in weight:
                if module_name(holding.tensor).rpartition(".")[2] not in targets:
                    continue
                row, column = divmod(holding.offset, columns)
                first = (slot * len(fused) + fused.index(holding.tensor)) * rank * columns + column
                a = Holding(tensor_name(holding, A), ((0, rank), holding.box[1]), len(buffers) - 2, first, (columns, 1))
                if a not in of_a:  # rows of a weight may lie apart
                    of_a.append(a)
                first = (slot * rows + row) * rank
                of_b.append(
                    Holding(tensor_name(holding, B), (holding.box[0], (0, rank)), len(buffers) - 1, first, (rank, 1))
                )
            holdings += [*of_a, *of_b]
    return LoadTrace(tuple(buffers), tuple(holdings), tuple(tensors))


def pooled_elements(weights: LoadTrace, lora: LoraConfig, targets: Sequence[str]) -> int:
    """Elements of A and B in a slot of one rank: a fused layer has those of all its layers.

    Args:
        weights: the trace of the model's weights.
        lora: the adapters.
        targets: linear layers that the model has, of which `lora` may name some.
    """
    elements = 0
    for number, buffer in enumerate(weights.buffers):
        fused = {holding.tensor for holding in weights.holdings if holding.buffer == number}
        if any(module_name(tensor).rpartition(".")[2] in (lora.targets or targets) for tensor in fused):
            rows, columns = buffer.shape
            elements += lora.rank * (len(fused) * columns + rows)
    return elements


def tensor_name(weight: Holding, kind: str) -> str:
    """Name of the A or B of a weight."""
    return f"{module_name(weight.tensor)}.{kind}.weight"
