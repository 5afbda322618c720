"""A trainer's shards: from shapes alone they are what a real trainer has in memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.rules import LocalParameter, TensorSlice
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location, RankShards
from engine3d.reshard.describe.source import PlannedTrainer, model_shards, planned_shards, registration_order
from tests.support.distributed import run_distributed
from tests.support.tiny_families import CONFIGS, has_experts

HERE = Location("node", "slot 0")
LAYOUTS = {1: [Layout()], 2: [Layout(ep=2, dp=2), Layout(tp=2), Layout(pp=2), Layout(pp=2, vpp=2), Layout(dp=2)]}


def test_storages_are_buffers_and_views_are_holdings() -> None:
    memory = torch.arange(100, dtype=torch.bfloat16)
    box = ((2, 4), (0, 3))
    first = LocalParameter("first", (2, 3), (TensorSlice("a", box, ((0, 2), (0, 3))),), owner=True, primary=True)
    second = LocalParameter("second", (4,), (TensorSlice("b", ((0, 3),), ((1, 4),)),), owner=True, primary=True)
    third = LocalParameter("third", (2,), (TensorSlice("c", ((0, 2),), ((0, 2),)),), owner=True, primary=True)
    bias = torch.zeros(2)
    tensors = [(first, memory[10:30].view(2, 10)[:, :3]), (second, memory[50:54]), (third, bias)]
    shards, storages = model_shards(tensors, "trainer rank 7", 7, HERE)
    assert (shards.name, shards.rank, shards.location) == ("trainer rank 7", 7, HERE)
    assert [(buffer.dtype, buffer.shape) for buffer in shards.buffers] == [("bfloat16", (100,)), ("float32", (2,))]
    assert [storage.data_ptr() for storage in storages] == [memory.data_ptr(), bias.data_ptr()]
    rows = [
        (holding.tensor, holding.box, holding.buffer, holding.offset, holding.strides) for holding in shards.holdings
    ]
    assert rows == [
        ("a", box, 0, 10, (10, 1)),
        ("b", ((0, 3),), 0, 51, (1,)),
        ("c", ((0, 2),), 1, 0, (1,)),
    ]


def test_numbers_in_names_are_ordered_as_numbers() -> None:
    names = [f"decoder.layers.2.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in (0, 2, 10)]
    # Grouped layers register the last expert first.
    names += [f"decoder.layers.10.mlp.experts.linear_fc1.weight{expert}" for expert in (10, 2, 0)]
    as_text = sorted(names)
    assert as_text != names and sorted(as_text, key=registration_order) == names


@pytest.mark.processes
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_planned_memory_is_real_memory(world_size: int) -> None:
    for rank, differing in enumerate(run_distributed(compare_all, world_size, timeout_s=240)):
        assert differing and not any(differing.values()), (rank, differing)


def compare_all() -> dict[tuple[str, str], list[str]]:
    """Compare planned with real memory for every layout and model. Returns the differences."""
    from engine3d.training.megatron import parallel

    differing = {}
    for layout in LAYOUTS[int(os.environ["WORLD_SIZE"])]:
        coordinates = parallel.initialise(layout, seed=1, timeout_s=60)
        from megatron.core import parallel_state

        for name, config in CONFIGS.items():
            if layout.ep == 1 or has_experts(name):
                spec = model_spec(config).of_trainer(layout, transformer_engine=platform.has_transformer_engine)
                differing[str(layout), name] = compare(spec, layout, coordinates)
        parallel_state.destroy_model_parallel()
    parallel.leave()
    return differing


def compare(spec: Any, layout: Layout, coordinates: Any) -> list[str]:
    from engine3d.models import build_model
    from engine3d.models.files.weights import rank_parameters
    from engine3d.training.config import TrainConfig
    from engine3d.training.optimizer import wrap_for_training

    rank = int(os.environ["RANK"])
    model = build_model(spec, layout, torch.float32)
    chunks = wrap_for_training(model, TrainConfig())
    assert len(chunks) == layout.vpp
    real, _ = model_shards(rank_parameters(model, spec, layout, coordinates), "real", rank, HERE)
    fused = platform.has_transformer_engine
    planned = planned_shards(spec, layout, rank, HERE, torch.float32, transformer_engine=fused)
    one, other = memory_layout(planned), memory_layout(real)
    return sorted(str(key) for key in one.keys() | other.keys() if one.get(key) != other.get(key))[:5]


def memory_layout(shards: RankShards) -> dict[Any, Any]:
    """Map each box to its memory's shape, its offset and strides."""
    return {
        (holding.tensor, holding.box): (shards.buffers[holding.buffer].elements, holding.offset, holding.strides)
        for holding in shards.holdings
    }


def test_the_tensor_of_an_element_is_found() -> None:
    spec = model_spec(CONFIGS["deepseek_v3"])
    planned = PlannedTrainer(spec, Layout.of_world(2, tp=2), torch.float32, transformer_engine=False)
    shards = planned.shards(1, Location("here", "cpu:1"))
    for holding in shards.holdings:
        steps = [
            (stop - start - 1) * stride for (start, stop), stride in zip(holding.box, holding.strides, strict=True)
        ]
        for element in (holding.offset, holding.offset + sum(steps)):
            assert shards.tensor_at(holding.buffer, element) == holding.tensor
    assert shards.tensor_at(0, shards.buffers[0].elements - 1) is None
