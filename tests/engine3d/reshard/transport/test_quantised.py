"""Weights of a rank in fp8: what is offered to engines, and when it is quantised."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine3d.layout import Layout
from engine3d.memory.resident import quantised_bytes
from engine3d.models import ModelSpec, model_spec
from engine3d.models.precision import dequantise, quantise, scale_box, scale_name, served_tensors
from engine3d.models.rules import LocalParameter
from engine3d.reshard.describe.shards import Holding, Location
from engine3d.reshard.transport.program import flat
from engine3d.reshard.transport.quantised import QuantisedWeights
from engine3d.reshard.transport.sender import WeightSender
from tests.support.tiny_families import FP8_CONFIGS

HERE = Location("here", "cpu:0")


def weights_of(spec: ModelSpec, layout: Layout, rank: int) -> tuple[QuantisedWeights, list[torch.Tensor]]:
    """A rank's parameters with the values of `complete`, and what it offers."""
    parameters: list[tuple[LocalParameter, torch.Tensor]] = []
    for local in spec.local_parameters(layout, layout.coordinates(rank), transformer_engine=False):
        parameter = torch.zeros(local.shape, dtype=torch.float32 if local.buffer else torch.bfloat16)
        for tensor_slice in local.slices:
            parameter[indices(tensor_slice.local_box)] = complete(spec, tensor_slice.hf_name)[
                indices(tensor_slice.hf_box)
            ].to(parameter.dtype)
        parameters.append((local, parameter))
    tensors = [tensor for _, tensor in parameters]
    return QuantisedWeights(parameters, spec.hf_tensors, f"rank {rank}", rank, HERE), tensors


def complete(spec: ModelSpec, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(spec.hf_shape(name), generator=generator).bfloat16()


def indices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def values_of(weights: QuantisedWeights, holding: Holding) -> torch.Tensor:
    buffer, storage = weights.shards.buffers[holding.buffer], weights.storages[holding.buffer]
    dtype = getattr(torch, buffer.dtype)
    memory = flat(storage, dtype, 0, storage.nbytes() // dtype.itemsize)
    sizes = [stop - start for start, stop in holding.box]
    return memory.as_strided(sizes, holding.strides, holding.offset)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Every family in shards and copies of them; on one of the other layouts in turns, on all before a release.
        pytest.param(
            *(name, layout),
            marks=() if row == 3 or row == number % 3 else pytest.mark.release,
            id=f"{name}-{layout}",
        )
        for number, name in enumerate(FP8_CONFIGS)
        for row, layout in enumerate([Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, dp=2)])
    ],
)
def test_ranks_offer_every_element_of_what_engines_hold(name: str, layout: Layout) -> None:
    spec = model_spec(FP8_CONFIGS[name])
    served = served_tensors(spec, torch.bfloat16, "fp8")
    expected: dict[str, torch.Tensor] = {}
    for tensor in spec.hf_tensors.values():
        expected[tensor.name] = complete(spec, tensor.name)
        if tensor.fp8:
            expected[tensor.name], expected[scale_name(tensor.name)] = quantise(expected[tensor.name])
    offered = {key: np.zeros(shape, dtype=bool) for key, (shape, _) in served.items()}
    for rank in range(layout.world_size):
        weights, _ = weights_of(spec, layout, rank)
        weights.quantise()
        for holding in weights.shards.holdings:
            values = values_of(weights, holding)
            assert values.dtype == served[holding.tensor][1]
            assert torch.equal(values.float(), expected[holding.tensor][indices(holding.box)].float()), holding.tensor
            offered[holding.tensor][indices(holding.box)] = True
        quantised = sum(storage.nbytes() for storage in weights.storages[-2:])
        assert quantised == quantised_bytes(spec, layout, layout.coordinates(rank), transformer_engine=False)
    assert all(elements.all() for elements in offered.values())


def test_scales_take_little_next_to_values() -> None:
    weights, _ = weights_of(model_spec(FP8_CONFIGS["qwen3"]), Layout(), 0)
    values, scales = weights.storages[-2:]
    assert scales.nbytes() < values.nbytes() / 1000


def test_weights_are_quantised_once_for_each_version() -> None:
    spec = model_spec(FP8_CONFIGS["qwen3"])
    weights, parameters = weights_of(spec, Layout(), 0)
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        weights.quantise()

    from engine3d.reshard.plan.coordinate import SendOrder

    sender = WeightSender(weights.shards, weights.storages, counted)
    nothing = SendOrder((), {}, None)
    sender.connect(nothing, nothing)
    sender.send(1, 0)
    sender.send(1, 1)
    assert calls == 1
    holding = next(holding for holding in weights.shards.holdings if holding.tensor.endswith("q_proj.weight"))
    before = values_of(weights, holding).float().clone()
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.7)
    sender.send(2, 0)
    assert calls == 2 and not torch.equal(values_of(weights, holding).float(), before)
    sender.send(2, 0)  # of an engine that was lost, and of weights that may have changed
    assert calls == 3
    box = holding.box
    scales = next(other for other in weights.shards.holdings if other.tensor == scale_name(holding.tensor))
    assert scales.box == scale_box(box)
    values = dequantise(values_of(weights, holding), values_of(weights, scales), box)
    scaled = (0.7 * complete(spec, holding.tensor).float()).bfloat16().float()
    assert (values - scaled).abs().max() <= scaled.abs().max() / 16
