"""Device maps: what they name, and the errors of those that do not fit."""

from __future__ import annotations

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device, DeviceMap, Node, highest_cpu_slot, pool_devices

LAPTOP = [Node("this machine", gpus=0, cpu_slots=4)]
CLUSTER = [Node("10.0.0.1", gpus=4, cpu_slots=16), Node("10.0.0.2", gpus=4, cpu_slots=16)]


@pytest.mark.parametrize(
    ("text", "indices", "again"),
    [
        ("cuda:0-3", (0, 1, 2, 3), "cuda:0-3"),
        ("cuda:0,2", (0, 2), "cuda:0,2"),
        ("cpu: 0", (0,), "cpu:0"),
        ("cpu:3,0-1", (3, 0, 1), "cpu:3,0-1"),
        ("node:2-3", (2, 3), "node:2-3"),
    ],
)
def test_parse(text: str, indices: tuple[int, ...], again: str) -> None:
    parsed = DeviceMap.parse(text)
    assert parsed.indices == indices
    assert str(parsed) == again


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gpu:0", "the kind is 'gpu', expected cpu, cuda, node or role"),
        ("", "the kind is ''"),
        ("cuda", "names no device"),
        ("cuda:", "names no device"),
        ("cuda:0-", "'0-' is not an index or a range"),
        ("cuda:a", "'a' is not an index or a range"),
        ("cuda:0,,1", "'' is not an index or a range"),
        ("cuda:3-1", "the range 3-1 is empty, expected 1-3"),
        ("cuda:0-2,1", "cuda:1 stands in it twice"),
    ],
)
def test_parse_errors(text: str, error: str) -> None:
    with pytest.raises(UserError) as caught:
        DeviceMap.parse(text)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


ROLES = [
    Node("10.0.0.1", gpus=2, cpu_slots=8, role="train"),
    Node("10.0.0.2", gpus=2, cpu_slots=8, role="rollout"),
    Node("10.0.0.3", gpus=2, cpu_slots=8, role="train"),
    Node("10.0.0.4", gpus=0, cpu_slots=8, role="reward"),
]


def test_a_role_means_the_nodes_that_are_for_it() -> None:
    assert str(DeviceMap.parse("role:train")) == "role:train"
    results = pool_devices({"actor": "role:train", "rollout": "role:rollout", "reward": "role:reward"}, {}, ROLES)
    assert results["actor"] == tuple(Device(node, "cuda", index) for node in (0, 2) for index in (0, 1))
    assert results["rollout"] == (Device(1, "cuda", 0), Device(1, "cuda", 1))
    assert results["reward"] == (Device(3, "cpu", 0),)
    assert pool_devices({"rollout": "cuda:2-3"}, {}, ROLES)["rollout"] == results["rollout"]


@pytest.mark.parametrize(
    ("roles", "nodes", "error"),
    [
        ({"actor": "role:train"}, CLUSTER, "no node has this role, the cluster (2 nodes) has none with a role"),
        ({"reward": "role:reward"}, ROLES[:3], "no node has this role, the cluster (3 nodes) has rollout, train"),
        ({"actor": "role:learn"}, ROLES, "the role is 'learn', expected train, rollout, reward"),
        (
            {"actor": "cuda:0-2"},
            ROLES,
            'placement.actor: cuda 0 of 10.0.0.2, whose role is rollout; expected nodes for train, such as "role:tra',
        ),
        ({"critic": "node:1"}, ROLES, "placement.critic: cuda 0 of 10.0.0.2, whose role is rollout"),
        ({"rollout": "cuda:0"}, ROLES, "placement.rollout: cuda 0 of 10.0.0.1, whose role is train"),
        ({"reward": "cpu:8"}, ROLES, "placement.reward: cpu 0 of 10.0.0.2, whose role is rollout"),
    ],
)
def test_roles_that_nodes_do_not_have_are_refused(roles: dict[str, str], nodes: list[Node], error: str) -> None:
    with pytest.raises(UserError) as caught:
        pool_devices(roles, {}, nodes)
    assert error in str(caught.value)


def test_gpus_count_over_the_nodes() -> None:
    assert DeviceMap.parse("cuda:3-4").devices(CLUSTER) == (Device(0, "cuda", 3), Device(1, "cuda", 0))
    assert DeviceMap.parse("node:1").devices(CLUSTER) == tuple(Device(1, "cuda", index) for index in range(4))
    assert DeviceMap.parse("node:0").devices(LAPTOP) == tuple(Device(0, "cpu", index) for index in range(4))


@pytest.mark.parametrize(
    ("text", "nodes", "error"),
    [
        ("cuda:0", LAPTOP, "there is no cuda:0, the cluster (this machine) has no GPUs"),
        ("cuda:7-8", CLUSTER, "there is no cuda:8, the cluster (2 nodes) has 8 GPUs"),
        ("node:0-2", CLUSTER, "there is no node 2, the cluster has 2 nodes"),
        ("cpu:4", LAPTOP, "there is no cpu:4, the cluster (this machine) has 4 CPU slots"),
    ],
)
def test_beyond_the_cluster(text: str, nodes: list[Node], error: str) -> None:
    with pytest.raises(UserError) as caught:
        DeviceMap.parse(text).devices(nodes)
    assert error in str(caught.value)


def test_roles_may_share_devices_and_name_pools() -> None:
    roles = {"actor": "train", "critic": "train", "rollout": "cpu:1-2"}
    devices = pool_devices(roles, {"train": "cpu:0-1"}, LAPTOP)
    assert devices["actor"] == devices["critic"] == (Device(0, "cpu", 0), Device(0, "cpu", 1))
    assert devices["rollout"] == (Device(0, "cpu", 1), Device(0, "cpu", 2))


def test_pools_share_no_device() -> None:
    with pytest.raises(UserError, match=r"placement\.pools\.two: cpu 1 of this machine is in pool one too"):
        pool_devices({}, {"one": "cpu:0-1", "two": "cpu:1-2"}, LAPTOP)


def test_errors_name_the_role() -> None:
    with pytest.raises(UserError, match=r"placement\.rollout: device map cuda:0: there is no cuda:0"):
        pool_devices({"rollout": "cuda:0"}, {}, LAPTOP)
    with pytest.raises(
        UserError, match=r"placement\.rollout: there is no pool 'trian', expected train or a device map"
    ):
        pool_devices({"rollout": "trian"}, {"train": "cpu:0"}, LAPTOP)
    mixed = [CLUSTER[0], LAPTOP[0]]
    with pytest.raises(UserError, match=r"placement\.rollout: node:0-1 mixes nodes with GPUs and nodes without"):
        pool_devices({"rollout": "node:0-1"}, {}, mixed)


def test_a_laptop_offers_as_many_slots_as_are_named() -> None:
    assert highest_cpu_slot(["cpu:0-3", "cuda:0-7", "cpu:5"]) == 6
    assert highest_cpu_slot(["cuda:0", "train", "cpu:x"]) == 0
