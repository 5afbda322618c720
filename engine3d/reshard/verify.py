"""Verification that an engine's rank holds, bit for bit, what SGLang's own loader makes of an export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine3d.errors import UserError
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.lora.peft_files import ADAPTERS
from engine3d.models.lora.spec import A, B, module_name
from engine3d.reshard.describe.adapter import resident_adapter
from engine3d.reshard.describe.shards import Holding
from engine3d.reshard.describe.trace import LoadTrace, derived_tensors

_LAYER = re.compile(r"\.layers\.\d+\.")
_EXPERT = re.compile(r"(?<=\.experts)\.\d+")
_POISON = 0xA5
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class BufferDifference:
    """Buffer of a rank that differs from what the loader makes of the export.

    Args:
        buffer: SGLang's name of the parameter, or of what it derives from one.
        tensor: the first HuggingFace tensor whose elements differ; None where they are of no tensor.
        elements: that differ.
        of: elements of the buffer.
    """

    buffer: str
    tensor: str | None
    elements: int
    of: int

    def __str__(self) -> str:
        tensor = f" (tensor {self.tensor})" if self.tensor else ""
        return f"{self.buffer}{tensor}: {self.elements} of {self.of} elements differ"


def differences(model: torch.nn.Module, trace: LoadTrace, directory: Path) -> list[BufferDifference]:
    """Compare a rank's memory with what `model.load_weights` makes of a HuggingFace directory.

    Layer by layer, the parameters are given other memory full of a pattern, the loader fills it, and the bits are
    compared; then they get their own memory back. What SGLang derives from parameters is derived from the export on the
    way, compared, and put back: nothing is changed in the end. Takes the memory of one layer and of what is derived.

    Raises:
        UserError: the directory lacks a tensor that the loader reads.
    """
    by_group: dict[str, list[Holding]] = {}
    for holding in trace.holdings:
        match = _LAYER.search(holding.tensor)
        by_group.setdefault(match[0] if match else "", []).append(holding)
    derived = {name: tensor.clone() for name, tensor in derived_tensors(model).items()}
    differing: list[BufferDifference] = []
    with TensorFiles(directory) as files, torch.no_grad():
        try:
            for holdings in by_group.values():
                differing += _compare(model, trace, holdings, files)
            for name, tensor in derived_tensors(model).items():
                if count := int(torch.ne(_bits(tensor), _bits(derived[name])).sum()):
                    differing.append(BufferDifference(name, None, count, tensor.numel()))
        finally:
            for name, tensor in derived_tensors(model).items():
                tensor.copy_(derived[name])
    return differing


def _compare(
    model: torch.nn.Module, trace: LoadTrace, holdings: list[Holding], files: TensorFiles
) -> Iterator[BufferDifference]:
    indices = sorted({holding.buffer for holding in holdings})
    names = dict.fromkeys(holding.tensor for holding in holdings)
    memory = loadable_memory(model)
    tensors = {index: memory[trace.buffers[index].name] for index in indices}
    original = {index: tensor.data for index, tensor in tensors.items()}
    loaded: dict[int, torch.Tensor] = {}
    loader: Any = model
    try:
        for index in indices:
            loaded[index] = torch.empty(
                trace.buffers[index].shape, dtype=original[index].dtype, device=original[index].device
            )
            loaded[index].view(torch.uint8).fill_(_POISON)
            tensors[index].data = loaded[index]
        loader.load_weights(_read(files, list(names)))
    finally:
        for index in indices:
            tensors[index].data = original[index]
    for index in indices:
        differ = _bits(original[index]) != _bits(loaded[index])
        if count := int(differ.sum()):
            tensor = next((h.tensor for h in holdings if h.buffer == index and _within(differ, h).any()), None)
            yield BufferDifference(trace.buffers[index].name, tensor, count, differ.numel())


def adapter_differences(manager: Any, trace: LoadTrace, directory: Path) -> list[BufferDifference]:
    """Compare a rank's adapter with what SGLang's LoRA loads of an export.

    SGLang's loader fills the slot of requests without an adapter, whose elements nothing reads. It gets zeros for
    layers of a fused one that have no adapter, since it loads some sets of these not at all.

    Args:
        manager: SGLang's `LoRAManager`.
        trace: of the adapter (`adapter_trace`).
        directory: export with the adapters in `ADAPTERS`.
    """
    from sglang.srt.lora.lora import LoRAAdapter

    name, slot = resident_adapter(manager)
    pool, config = manager.memory_pool, manager.configs[name]
    other = pool.get_buffer_id(None)
    layers = {buffer.name.rpartition(".")[0] for buffer in trace.buffers}
    with TensorFiles(directory) as files, TensorFiles(directory / ADAPTERS) as stored:
        tensors = dict(_read(stored, list(stored.tensors)))
        for weight, tensor in files.tensors.items():
            if weight.endswith(".weight") and _fused_layer(weight) in layers:
                rows, columns = tensor.shape
                for kind, shape in ((A, (config.r, columns)), (B, (rows, config.r))):
                    tensors.setdefault(f"{module_name(weight)}.{kind}.weight", torch.zeros(shape))
    adapter = LoRAAdapter(
        name, config, manager.base_hf_config, manager.load_config, manager.lora_backend, base_model=manager.base_model
    )
    adapter.initialize_weights_from_tensors(tensors)
    pool.load_lora_weight_to_buffer(name, other, adapter, manager.lora_modules, None, None)
    differing: list[BufferDifference] = []
    for buffer, pooled in zip(trace.buffers, trace.tensors, strict=True):
        if count := int(torch.ne(_bits(pooled[slot]), _bits(pooled[other])).sum()):
            differing.append(BufferDifference(buffer.name, None, count, pooled[slot].numel()))
    pool._clear_buffer_slot_for_base(other)
    return differing


def _fused_layer(tensor: str) -> str:
    """SGLang's layer of an adapter's tensor, with all experts in one."""
    from sglang.srt.lora.utils import get_normalized_target_modules

    module, _, last = module_name(tensor.removesuffix(".weight")).rpartition(".")
    (fused,) = get_normalized_target_modules([last])
    return f"{_EXPERT.sub('', module)}.{fused}"


def loadable_memory(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and registered buffers as they are now, by name."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _read(files: TensorFiles, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        if name not in files.tensors:
            raise UserError(f"tensor {name}: missing in {files.directory}")
        yield name, files.stored(name, tuple((0, size) for size in files.tensors[name].shape))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _within(differ: torch.Tensor, holding: Holding) -> torch.Tensor:
    sizes = [stop - start for start, stop in holding.box]
    return differ.contiguous().as_strided(sizes, holding.strides, holding.offset)
