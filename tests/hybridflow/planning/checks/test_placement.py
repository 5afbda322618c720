"""Layouts against the nodes that they are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reshard_plan import named_model
from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.cli.main import main
from hybridflow.cluster.devices.device_map import DeviceMap, Node
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.placement import (
    assumed_nodes,
    check_batch_sizes,
    check_copy_engine_dispatcher,
    check_released_weights,
    groups_over_nodes,
    planned_devices,
)
from tests.support.runs import DEMO

RECIPES = Path(DEMO).parent
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


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_for_gpus_have_their_nodes_on_a_machine_without(path: Path) -> None:
    recipe = load_recipe(path)
    nodes = assumed_nodes([recipe])
    devices = planned_devices(recipe.device_maps, recipe.placement, nodes)
    on_gpus = any(device.kind == "cuda" for role_devices in (devices or {}).values() for device in role_devices)
    assert on_gpus == (nodes is not None)


def test_nodes_of_several_forms_of_device_maps() -> None:
    def assumed(*placement: str) -> list[tuple[int, str | None]] | None:
        nodes = assumed_nodes([load_recipe(DEMO, [f"placement.{override}" for override in placement])])
        return None if nodes is None else [(node.gpus, node.role) for node in nodes]

    assert assumed("actor=cuda:0-1", "rollout=cuda:2") == [(3, None)]
    assert assumed("actor=cuda:0-15", "rollout=cuda:16-23") == [(8, None)] * 3
    assert assumed("actor=node:0", "rollout=node:1-3") == [(8, None)] * 4
    assert assumed("actor=role:train", "rollout=role:rollout") == [(8, "train"), (8, "rollout")]
    assert assumed("actor=node:0", "rollout=cpu:0") is None
    assert assumed("actor=cuda:0", "rollout=cuda:0", "cluster=10.0.0.1:6379") is None


def test_ranks_that_copy_into_each_others_memory_are_on_one_node() -> None:
    spec = named_model("qwen3-30b-a3b")
    gathering = "train.megatron={moe_token_dispatcher_type: allgather}"
    recipe = load_recipe(DEMO, ["train.dtype=bfloat16", "train.copy_engine_dispatcher=true", gathering])
    devices = DeviceMap.parse("cuda:0-7").devices(NODES)
    check_copy_engine_dispatcher(recipe.train, "train", "actor", spec, Layout(ep=4, dp=8), devices)
    with pytest.raises(
        UserError,
        match=r"^train\.copy_engine_dispatcher=true: ranks 0-7 of placement\.actor share experts and are on several "
        "nodes; expected one node, or false$",
    ):
        check_copy_engine_dispatcher(recipe.train, "train", "actor", spec, Layout(ep=8, dp=8), devices)
    recipe = load_recipe(DEMO, ["train.dtype=bfloat16", gathering])
    check_copy_engine_dispatcher(recipe.train, "train", "actor", spec, Layout(ep=8, dp=8), devices)


def test_engines_that_release_weights_have_the_whole_model_on_their_node() -> None:
    devices = DeviceMap.parse("cuda:0-7").devices(NODES)  # four on each of two nodes
    check_released_weights(Layout(tp=8), devices, devices, engine_hosts=2)
    check_released_weights(Layout(ep=4, dp=8), devices, devices)
    check_released_weights(Layout(pp=2, dp=4), devices[:4] + devices[:4], devices[:4])
    check_released_weights(Layout(pp=2, dp=2), devices[:4], devices[4:])  # no device is shared
    with pytest.raises(
        UserError,
        match=r"^rollout\.engine\.release_weights=true: node 0 has stages 0 of the 2 of train\.layout\.pp, and its "
        r"engines read from all; expected false, or every stage on each node$",
    ):
        check_released_weights(Layout(pp=2, dp=4), devices, devices)
    with pytest.raises(
        UserError, match=r"node 0 has 4 of the 8 shards of the actor's layers.*every shard on each node"
    ):
        check_released_weights(Layout(tp=8), devices, devices)
    with pytest.raises(UserError, match=r"node 0 has 4 of the 8 shards of the actor's experts"):
        check_released_weights(Layout(ep=8, dp=8), devices, devices)


def test_a_step_of_preferences_has_a_pair_for_each_rank_and_mini_batch() -> None:
    """Two of the eight responses to a prompt are trained on, the best and the worst."""

    def of_prompts(count: int, *pairs: str) -> None:
        sizes = (f"trainer.prompts_per_step={count}", "trainer.mini_batches=2", "rollout.samples_per_prompt=8")
        recipe = load_recipe(DEMO, [*pairs, *sizes])
        check_batch_sizes(recipe.trainer, recipe.rollout, recipe.algorithm, None, engines=1, replicas=8)

    of_prompts(8)
    of_groups = ("algorithm.name=dpo", "algorithm.pairs=group")
    with pytest.raises(UserError, match=r"trainer\.prompts_per_step = 15, expected at least 16: a pair for each data-"):
        of_prompts(15, *of_groups)
    of_prompts(16, *of_groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.layout.stages=[1,2,1,0]", "layout: stages=1,2,1,0: stage 3 has no layers, expected at least 1 in each"),
        ("train.layout.stages=[1,2,1,1]", "layout: stages=1,2,1,1 add up to 5 layers, expected num_hidden_layers=4"),
        ("train.layout.stages=[2,2]", "layout: stages=2,2 has 2 stages, expected pp*vpp = 2*2 = 4"),
        ("train.layout.vpp=3", "layout: pp*vpp = 2*3 = 6 stages: expected at most num_hidden_layers=4"),
        ("train.layout.pp=1", "layout: vpp=2 with pp=1: expected vpp=1, or pp of at least 2"),
    ],
)
def test_stages_that_cannot_be_are_refused(override: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(RECIPES / "placement/four-ranks.yaml"), override]) == 2
    assert f"train.layout on placement.actor: {line}" in capsys.readouterr().err
