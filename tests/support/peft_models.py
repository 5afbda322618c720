"""Models of transformers with adapters of the peft library, on one rank, as what ours are compared with."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine3d.models import model_spec
from engine3d.models.files.weights import rank_parameters
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.peft_files import PREFIX
from engine3d.models.lora.spec import target_names
from tests.support import tiny_families
from tests.support.gradients import slices


def filled(name: str, shape: Sequence[int]) -> Tensor:
    """Values of an adapter's tensor, B's too, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.1 * torch.randn(*shape, generator=generator)


def fill(engine: Any) -> None:
    """Fill the adapters of a rank's engine."""
    with torch.no_grad():
        for local, tensor in rank_parameters(engine.module, engine.trained, engine.layout, engine.coordinates):
            for region in local.slices:
                full = filled(region.hf_name, engine.trained.hf_shape(region.hf_name))
                tensor[slices(region.local_box)].copy_(full[slices(region.hf_box)])
    engine.optimizer.reload_model_params()  # float32 ones of bf16 adapters


class _Experts(nn.ModuleList):
    """Experts of transformers as modules of their own, which peft gives adapters; transformers fuses them."""

    activation: Any

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.__dict__["activation"] = fused.act_fn  # no entry of the list
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            expert = nn.Module()
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.data.copy_(weight.data)
                expert.add_module(name, linear)
            self.append(expert)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, slot = torch.where(chosen == number)
            gate, up, down = (layer for _, layer in expert.named_children())
            output = down(self.activation(gate(hidden[tokens])) * up(hidden[tokens]))
            result = result.index_add(0, tokens, output * weights[tokens, slot, None])
        return result


def with_adapters(model: Any, name: str, lora: LoraConfig) -> Any:
    """Give a model of `tiny_families.make` adapters of peft, filled by `filled`."""
    import peft

    model.config.model_type = "unfused"  # by which peft expects fused experts
    if tiny_families.has_experts(name) and lora.adapts_mlps:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts = _Experts(layer.mlp.experts)
    targets = lora.targets or target_names(model_spec({**tiny_families.CONFIGS[name]}))
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(filled(file_name(key), parameter.shape))
    return adapted


def file_name(parameter: str) -> str:
    """Name of an adapter's tensor in files, without peft's prefix."""
    return parameter.removeprefix(PREFIX).replace(".default.weight", ".weight")


def adapter_tensors(adapted: Any) -> dict[str, Any]:
    """Parameters of the adapters by their names in files."""
    return {file_name(key): value for key, value in adapted.named_parameters() if value.requires_grad}
