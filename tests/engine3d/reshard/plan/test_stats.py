"""Figures: what is counted by hand for a small world, and what must hold in any."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.reshard.describe.shards import Buffer, Holding, Location, RankShards
from engine3d.reshard.plan import stats as stats_module
from engine3d.reshard.plan.aliases import find_aliases
from engine3d.reshard.plan.planner import make_plan
from engine3d.reshard.plan.stats import plan_stats
from tests.support.tiny_families import MOE
from tests.support.worlds import engines, shapes, trainer

TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"a": ((64,), torch.bfloat16), "b": ((32,), torch.bfloat16)}
SPEC = model_spec(MOE)


def rank(name: str, number: int, node: int, device: int, *holdings: Holding) -> RankShards:
    buffers = tuple(
        Buffer(holding.tensor, "bfloat16", (holding.box[0][1] - holding.box[0][0],)) for holding in holdings
    )
    buffered = tuple(replace(holding, buffer=buffer) for buffer, holding in enumerate(holdings))
    return RankShards(name, number, Location(f"node {node}", f"gpu {device}"), buffers, buffered)


def block(tensor: str, start: int, stop: int) -> Holding:
    return Holding(tensor, ((start, stop),), 0, 0, (1,))


def test_a_world_counted_by_hand() -> None:
    a, b = block("a", 0, 64), block("b", 0, 32)
    # Node 0 has half of a and all of b, node 1 the other half of a.
    sources = [
        rank("source 0", 0, 0, 0, block("a", 0, 32)),
        rank("source 1", 1, 0, 1, b),
        rank("source 2", 2, 1, 0, block("a", 32, 64)),
    ]
    targets = [rank("target 0", 0, 0, 1, a, b), rank("target 1", 1, 2, 0, a, b)]
    targets[0] = replace(targets[0], aliases=find_aliases(sources, targets[0]))
    plan = make_plan(sources, targets, {name: shape for name, (shape, _) in TENSORS.items()})
    stats = plan_stats(plan, sources, targets, TENSORS)
    assert stats == {
        "bytes_held": 384,
        "bytes_needed": 320,
        "bytes_moved": 320,
        "bytes_aliased": 64,
        "bytes_same_memory": 64,  # b on target 0
        "bytes_same_device": 0,
        "bytes_same_node": 64,  # source 0 to target 0
        "bytes_between_nodes": 256,  # half of a to target 0, a and b to target 1
        "moved_of_needed": 1.0,
        "moved_of_held": 320 / 384,
        "max_rank_bytes": 192,  # target 1
        "max_rank_network_bytes": 192,  # target 1
        "max_node_ingress_bytes": 192,  # node 2
        "max_node_egress_bytes": 128,  # node 0 to target 1: 64 and 64; node 1: 64 and 64
        "transfers": 5,
        "pieces": 5,
        "max_rank_pieces": 3,
        "staging_bytes": 192,
        "baseline_bytes_moved": 3 * 192 - 192 + 2 * 192,
        "baseline_max_rank_bytes": 192,
        "baseline_max_node_ingress_bytes": 192,  # node 2, which holds nothing
        "baseline_staging_bytes": 128 + 192,
    }
    assert json.loads(json.dumps(stats)) == stats


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("layout", [Layout(ep=4, dp=8), Layout(tp=2, pp=2, dp=2)], ids=str)
def test_what_holds_in_any_world(layout: Layout, colocated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "STAGING_BYTES", 1000)
    sources, targets = trainer(SPEC, layout), engines(SPEC, 4, 4, 2, first_node=0 if colocated else 5)
    targets = [replace(target, aliases=find_aliases(sources, target)) for target in targets]
    tensors = {name: (shape, torch.bfloat16) for name, shape in shapes(SPEC).items()}
    plan = make_plan(sources, targets, shapes(SPEC))
    stats = plan_stats(plan, sources, targets, tensors)
    links = ("same_memory", "same_device", "same_node", "between_nodes")
    assert sum(stats[f"bytes_{link}"] for link in links) == stats["bytes_held"]
    assert stats["bytes_held"] == stats["bytes_moved"] + stats["bytes_aliased"]
    assert stats["moved_of_needed"] == 1.0
    assert (stats["bytes_aliased"] > 0) == colocated
    if not colocated:
        assert stats["bytes_between_nodes"] == stats["bytes_moved"]
    assert stats["staging_bytes"] <= 1000
    assert stats["baseline_bytes_moved"] > stats["bytes_moved"]
    model = 2 * SPEC.parameter_count()
    holdings = sum(
        2 * (holding.box[0][1] - holding.box[0][0]) for holding in sources[0].holdings if len(holding.box) == 1
    )
    assert 0 < holdings < model and stats["baseline_max_rank_bytes"] == model


def test_nothing_to_move() -> None:
    source = rank("source", 0, 0, 0, block("a", 0, 64))
    target = rank("target", 0, 0, 0, block("a", 0, 64))
    target = replace(target, aliases=find_aliases([source], target))
    stats = plan_stats(make_plan([source], [target], {"a": (64,)}), [source], [target], {"a": TENSORS["a"]})
    assert stats["bytes_moved"] == stats["max_rank_bytes"] == stats["pieces"] == 0
    assert stats["moved_of_needed"] == 1.0 and stats["moved_of_held"] == 0.0
