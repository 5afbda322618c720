"""Layouts against the nodes that they are on."""

from __future__ import annotations

from engine3d.layout import Layout
from hybridflow.cluster.devices.device_map import DeviceMap, Node
from hybridflow.planning.placement_check import groups_over_nodes

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
