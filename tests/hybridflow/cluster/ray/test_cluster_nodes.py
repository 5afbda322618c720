"""Roles of nodes of an attached cluster, by their labels."""

from __future__ import annotations

from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.ray.cluster_nodes import ROLE_LABEL, _host


def told_by_ray(**labels: str) -> dict[str, Any]:
    """A node of `ray.nodes()`."""
    return {
        "NodeID": "a" * 56,
        "Alive": True,
        "NodeManagerAddress": "10.0.0.2",
        "NodeManagerHostname": "host-2",
        "Resources": {"CPU": 8.0, "GPU": 2.0, "node:10.0.0.2": 1.0},
        "Labels": {"ray.io/node-id": "a" * 56, **labels},
    }


def test_a_label_is_a_role() -> None:
    results = _host(0, told_by_ray(**{ROLE_LABEL: "rollout"}), None)
    assert results.node == Node("host-2", gpus=2, cpu_slots=8, role="rollout")
    assert (results.address, results.node_id) == ("10.0.0.2", "a" * 56)
    assert _host(0, told_by_ray(), None).role is None


def test_a_launch_says_it_itself() -> None:
    host = Host(2, "host-2", "10.0.0.2", role="train")
    results = _host(0, told_by_ray(**{ROLE_LABEL: "rollout"}), host)
    assert (results.role, results.node_id) == ("train", "a" * 56)


def test_a_wrong_role_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        _host(0, told_by_ray(**{ROLE_LABEL: "trainer"}), None)
    assert str(caught.value) == (
        "node 10.0.0.2 of the Ray cluster has the label hybridflow.role=trainer: expected one of train, rollout, reward"
    )
