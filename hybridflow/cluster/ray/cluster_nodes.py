"""The nodes of the Ray that this process uses, in the order in which placement counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from engine3d.errors import UserError, shortened
from hybridflow.cluster.devices.device_map import ROLES
from hybridflow.cluster.hosts.description import Host, HostRole
from hybridflow.cluster.ray.ray_session import started_hosts

ROLE_LABEL = "hybridflow.role"
"""Label of a node of an attached cluster that says what it is for, as `ray start --labels hybridflow.role=rollout`."""


def cluster_hosts() -> list[Host]:
    """Hosts of all living nodes: a launch's in its order, else this one first and then by address.

    Raises:
        UserError: a node has a label for a role that there is not.
    """
    here = ray.get_runtime_context().get_node_id()
    hosts = {host.address: host for host in started_hosts() or ()}

    def order(node: Mapping[str, Any]) -> tuple[int, bool, str, str]:
        address = node["NodeManagerAddress"]
        index = hosts[address].index if address in hosts else len(hosts)
        return index, node["NodeID"] != here, address, node["NodeID"]

    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=order)
    return [_host(index, node, hosts.get(node["NodeManagerAddress"])) for index, node in enumerate(alive)]


def _host(index: int, node: Mapping[str, Any], started: Host | None) -> Host:
    resources, address = node["Resources"], node["NodeManagerAddress"]
    host = started or Host(index, node["NodeManagerHostname"] or address, address, role=_labelled_role(node))
    gpus, slots = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    return replace(host, index=index, gpus=gpus, cpu_slots=slots, node_id=node["NodeID"])


def _labelled_role(node: Mapping[str, Any]) -> HostRole | None:
    role = (node.get("Labels") or {}).get(ROLE_LABEL)
    if role is None or role in ROLES:
        return role  # type: ignore[no-any-return]
    raise UserError(
        f"node {node['NodeManagerAddress']} of the Ray cluster has the label {ROLE_LABEL}={shortened(role)}: expected "
        f"one of {', '.join(ROLES)}"
    )
