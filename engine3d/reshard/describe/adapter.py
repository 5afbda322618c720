"""Adapter of an engine's rank: the elements of A and B in the memory pool of SGLang's LoRA.

SGLang cuts B as the rows of the weight that it belongs to, and A as its columns. So the trace of the weights says where
adapters lie, whatever the layer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from engine3d.errors import EngineError
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import A, B, module_name
from engine3d.reshard.describe.shards import Buffer, Holding
from engine3d.reshard.describe.trace import LoadTrace

EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
"""SGLang's weights of a layer's experts, of which each is one tensor."""
_OF_EXPERTS = "_moe"
EXPERT_TARGETS = (f"gate_up_proj{_OF_EXPERTS}", f"down_proj{_OF_EXPERTS}")
"""Its names of the adapters of these."""


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
        EngineError: SGLang has A or B of a layer in another shape, or adds none to a layer.
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
            for weight, target in _weights(module, of_buffer) or [
                (f"{module}.weight", get_target_module_name(module, pool.target_modules))
            ]:
                buffer = weights.buffers[of_buffer[weight]]
                of_weight = [holding for holding in weights.holdings if holding.buffer == of_buffer[weight]]
                matrices = _Matrices.of(buffer, of_weight)
                described = module if target in module else f"{module}.{target.removesuffix(_OF_EXPERTS)}"
                for kind, of_pool, shape in (
                    (A, LoRAType.LORA_A, (matrices.fused * rank, matrices.columns)),
                    (B, LoRAType.LORA_B, (matrices.rows, rank)),
                ):
                    tensor = pool.get_tensor(target, layer, of_pool)
                    expected = (*buffer.shape[:-2], *shape)
                    if tuple(tensor.shape[1:]) != expected:
                        raise EngineError(
                            f"{kind} of {described} has the shape {list(tensor.shape[1:])} in SGLang, expected "
                            f"{list(expected)}"
                        )
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    buffers.append(Buffer(f"{described}.{kind}", dtype, tuple(tensor.shape)))
                    tensors.append(tensor)
                kept = [holding for holding in of_weight if _last_name(holding) in targets]
                holdings += matrices.holdings(kept, rank, slot, len(buffers) - 2)
    missing = {holding.tensor for holding in weights.holdings if _last_name(holding) in targets}
    if missing := {tensor_name(tensor, A) for tensor in missing} - {holding.tensor for holding in holdings}:
        raise EngineError(f"SGLang adds no {min(missing)}")
    return LoadTrace(tuple(buffers), tuple(holdings), tuple(tensors))


def show_experts(manager: Any) -> None:
    """Give the parameters of experts with adapters the names that they have without, by which SGLang loads them.

    Args:
        manager: SGLang's `LoRAManager`, whose layers hide those of the model.
    """
    for modules in manager.lora_modules:
        for module in modules.values():
            for name, parameter in module.base_layer.named_parameters(recurse=False):
                if name not in module._parameters:
                    module.register_parameter(name, parameter)


def scale_experts(manager: Any) -> None:
    """Multiply B of experts, which a transfer has written, by alpha / rank, as SGLang does where it loads adapters.

    Of other layers SGLang scales outputs.

    Args:
        manager: SGLang's `LoRAManager`, as `resident_adapter` takes it.
    """
    from sglang.srt.lora.utils import LoRAType

    name, slot = resident_adapter(manager)
    pool = manager.memory_pool
    for layer, modules in enumerate(manager.lora_modules):
        if any(hasattr(module, EXPERT_WEIGHTS[0]) for module in modules.values()):
            for target in EXPERT_TARGETS:
                pool.get_tensor(target, layer, LoRAType.LORA_B)[slot].mul_(manager.loras[name].scaling)


def _weights(module: str, of_buffer: Mapping[str, int]) -> list[tuple[str, str]]:
    """Weights of a layer of experts, and SGLang's names of their adapters; empty of another layer."""
    weights = [f"{module}.{weight}" for weight in EXPERT_WEIGHTS]
    return list(zip(weights, EXPERT_TARGETS, strict=True)) if weights[0] in of_buffer else []


@dataclass(frozen=True)
class _Matrices:
    """The matrices of a weight: one, or one of each expert.

    Args:
        rows: of a matrix, of all layers that are one.
        columns: of a matrix.
        layers: names of the layers that are one, of each matrix.
    """

    rows: int
    columns: int
    layers: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, buffer: Buffer, holdings: Sequence[Holding]) -> _Matrices:
        *experts, rows, columns = buffer.shape
        layers: list[dict[str, None]] = [{} for _ in range(prod(experts))]
        for holding in holdings:
            layers[holding.offset // (rows * columns)][holding.tensor] = None
        return cls(rows, columns, tuple(map(tuple, layers)))

    @property
    def fused(self) -> int:
        """Layers that are one."""
        return max(map(len, self.layers))

    def holdings(self, weights: Sequence[Holding], rank: int, slot: int, buffer: int) -> list[Holding]:
        """A and B of weights in a slot of the pool.

        Args:
            weights: the holdings of these.
            rank: of the adapters.
            slot: number of the slot.
            buffer: number of the buffer of A, before that of B.
        """
        of_a: dict[Holding, None] = {}  # rows of a weight may lie apart
        of_b: list[Holding] = []
        for weight in weights:
            matrix, element = divmod(weight.offset, self.rows * self.columns)
            row, column = divmod(element, self.columns)
            matrix_of_pool = slot * len(self.layers) + matrix
            layer = self.layers[matrix].index(weight.tensor)
            first = (matrix_of_pool * self.fused + layer) * rank * self.columns + column
            of_a[
                Holding(tensor_name(weight.tensor, A), ((0, rank), weight.box[1]), buffer, first, (self.columns, 1))
            ] = None
            first = (matrix_of_pool * self.rows + row) * rank
            of_b.append(
                Holding(tensor_name(weight.tensor, B), (weight.box[0], (0, rank)), buffer + 1, first, (rank, 1))
            )
        return [*of_a, *of_b]


def pooled_elements(weights: LoadTrace, lora: LoraConfig, targets: Sequence[str], layers: int) -> int:
    """Elements of A and B in a slot of one rank: a fused layer has those of all its layers.

    SGLang's pool has room in every layer for what one layer has.

    Args:
        weights: the trace of the model's weights.
        lora: the adapters.
        targets: linear layers that the model has, of which `lora` may name some.
        layers: of the model.
    """
    elements: dict[str, list[int]] = {}
    for number, buffer in enumerate(weights.buffers):
        holdings = [holding for holding in weights.holdings if holding.buffer == number]
        if any(_last_name(holding) in (lora.targets or targets) for holding in holdings):
            matrices = _Matrices.of(buffer, holdings)
            of_weight = lora.rank * (matrices.fused * matrices.columns + matrices.rows) * len(matrices.layers)
            elements.setdefault(".".join(buffer.name.split(".")[-2:]), []).append(of_weight)
    return sum(sum(of_layers) * layers // len(of_layers) for of_layers in elements.values())


def _last_name(holding: Holding) -> str:
    return module_name(holding.tensor).rpartition(".")[2]


def tensor_name(weight: str, kind: str) -> str:
    """Name of the A or B of a weight."""
    return f"{module_name(weight)}.{kind}.weight"
