"""Layouts against the nodes that they are on."""

from __future__ import annotations

import pytest

from benchmarks.reshard_plan import named_model
from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.cluster.devices.device_map import DeviceMap, Node
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.placement_check import check_batch_sizes, check_expert_copies, groups_over_nodes
from tests.support.runs import DEMO

NODES = [Node("host-0", gpus=4, cpu_slots=0), Node("host-1", gpus=4, cpu_slots=0)]


def test_groups_over_several_nodes_are_told() -> None:
    layouts = {"actor": Layout(tp=4, dp=2, ep=8), "critic": Layout(tp=2, dp=4), "rollout": Layout(dp=2)}
    devices = dict.fromkeys(layouts, DeviceMap.parse("cuda:0-7").devices(NODES))
    assert groups_over_nodes(layouts, devices, NODES) == [
        "placement.actor: 1 of 1 expert-parallel groups are on several nodes (ranks 0-7 on host-0, host-1): their "
        "collectives cross the network"
    ]
    assert groups_over_nodes({"rollout": Layout()}, {"rollout": devices["rollout"]}, NODES) == [
        "placement.rollout: 1 of 1 tensor-parallel groups are on several nodes (ranks 0-7 on host-0, host-1): their "
        "collectives cross the network"
    ]
    devices = {"critic": DeviceMap.parse("cuda:3-4").devices(NODES)}
    assert "1 of 1 tensor-parallel groups are on several nodes (ranks 0-1 on host-0, host-1)" in "".join(
        groups_over_nodes({"critic": Layout(tp=2)}, devices, NODES)
    )


def test_ranks_that_copy_into_each_others_memory_are_on_one_node() -> None:
    spec = named_model("qwen3-30b-a3b")
    gathering = "train.megatron={moe_token_dispatcher_type: allgather}"
    recipe = load_recipe(DEMO, ["train.dtype=bfloat16", "train.expert_copies=true", gathering])
    devices = DeviceMap.parse("cuda:0-7").devices(NODES)
    check_expert_copies(recipe, "actor", spec, Layout(ep=4, dp=8), devices)
    with pytest.raises(
        UserError,
        match=r"^train\.expert_copies=true: ranks 0-7 of placement\.actor share experts and are on several nodes; "
        "expected one node, or false$",
    ):
        check_expert_copies(recipe, "actor", spec, Layout(ep=8, dp=8), devices)
    recipe = load_recipe(DEMO, ["train.dtype=bfloat16", gathering])
    check_expert_copies(recipe, "actor", spec, Layout(ep=8, dp=8), devices)


def test_a_step_of_preferences_has_a_pair_for_each_rank_and_mini_batch() -> None:
    """Of the eight responses to a prompt two are learned from, the best and the worst."""

    def of_prompts(count: int, *pairs: str) -> None:
        sizes = (f"trainer.prompts_per_step={count}", "trainer.mini_batches=2", "rollout.samples_per_prompt=8")
        check_batch_sizes(load_recipe(DEMO, [*pairs, *sizes]), engines=1, replicas=8)

    of_prompts(8)
    of_groups = ("algorithm.name=dpo", "algorithm.pairs=group")
    with pytest.raises(UserError, match=r"trainer\.prompts_per_step = 15, expected at least 16: a pair for each data-"):
        of_prompts(15, *of_groups)
    of_prompts(16, *of_groups)
