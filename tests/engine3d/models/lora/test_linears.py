"""Adapters of grouped linear layers, whose kernels exist on a CPU too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.linears import AdaptedExperts
from engine3d.models.lora.spec import AdapterSpec
from tests.support.tiny_families import CONFIGS

SPEC = model_spec(CONFIGS["qwen3_moe"])
COUNTS = [3, 0, 2, 1, 0, 4, 1, 2]


class _OneRank:
    def size(self) -> int:
        return 1


class _Grouped(nn.Module):
    """A grouped layer of experts as Transformer Engine's, without it."""

    def __init__(self, shape: tuple[int, int], kernel: bool) -> None:
        super().__init__()
        self._tp_group, self._kernel, self.explicit_expert_comm = _OneRank(), kernel, False
        self.config = type("Config", (), {"sequence_parallel": False})()
        for number in range(SPEC.sizes.experts):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(shape), requires_grad=False))

    def has_kernel(self, dtype: torch.dtype, weight: Tensor) -> bool:
        return self._kernel

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        weights = [getattr(self, f"weight{number}") for number in range(len(counts))]
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(counts), weights, strict=True)]), None


class _Switch:
    enabled, scale = True, 1.5


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("targets", [None, ("up_proj",), ("gate_proj", "down_proj")])
@pytest.mark.parametrize("linear", ["linear_fc1", "linear_fc2"])
def test_adapters_of_grouped_experts_are_those_of_each_expert(
    linear: str, targets: tuple[str, ...] | None, kernel: bool
) -> None:
    torch.manual_seed(0)
    spec = AdapterSpec.of(SPEC, LoraConfig(rank=4, targets=targets))
    local = spec.local_parameters(Layout(), Layout().coordinates(0), transformer_engine=True)
    stem = f"decoder.layers.0.mlp.experts.{linear}.lora_"
    first, second = ([of for of in local if of.name.startswith(stem + kind)] for kind in "AB")
    if not first:
        return
    grouped = _Grouped((second[0].shape[0], first[0].shape[1]), kernel)
    adapted = AdaptedExperts(_Switch(), grouped, first, second)
    blocks = []
    for tensors in zip(*adapted.pairs, strict=True):  # adjacent in memory, as in Megatron-Core's buffers
        block: Any = torch.randn(len(tensors), *tensors[0].shape)
        gradients = torch.zeros_like(block)
        for tensor, values, gradient in zip(tensors, block, gradients, strict=True):
            tensor.data, tensor.main_grad = values, gradient
        blocks.append((tensors, gradients))
    x = torch.randn(sum(COUNTS), first[0].shape[1], requires_grad=True)
    slope = torch.randn(sum(COUNTS), second[0].shape[0])
    output, _ = grouped(x, COUNTS)
    (output * slope).sum().backward()
    actual = [torch.stack([t.grad if t.grad is not None else torch.zeros_like(t) for t in of]) for of, _ in blocks]
    if kernel:
        assert not any(of.any() for of in actual)
        actual = [gradients for _, gradients in blocks]
    given, x.grad = x.grad, None
    expected = []
    for number, rows in enumerate(x.split(COUNTS)):
        weight = (
            getattr(grouped, f"weight{number}")
            + 1.5 * adapted.masked(adapted.pairs[number][1]) @ adapted.pairs[number][0]
        )
        expected.append(F.linear(rows, weight))
    for tensor in (tensor for of, _ in blocks for tensor in of):
        tensor.grad = None
    torch.testing.assert_close(output, torch.cat(expected), rtol=1e-4, atol=1e-4)
    (torch.cat(expected) * slope).sum().backward()
    torch.testing.assert_close(given, x.grad, rtol=1e-4, atol=1e-4)
    for (tensors, _), gradient in zip(blocks, actual, strict=True):
        reference = torch.stack([t.grad for t in tensors])
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4)
