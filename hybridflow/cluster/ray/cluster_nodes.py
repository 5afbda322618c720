"""The nodes of the Ray that this process uses, in the order in which placement counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from engine3d.errors import UserError, shortened
from hybridflow.cluster.devices.device_map import ROLES, Node
from hybridflow.cluster.hosts.description import Host, HostRole
from hybridflow.cluster.ray.ray_session import started_hosts

ROLE_LABEL = "hybridflow.role"
"""Label of a node of an attached cluster that says what it is for, as `ray start --labels hybridflow.role=rollout`."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One living node.

    Args:
        index: in the cluster, as placement counts.
        node: as placement sees it.
        node_id: by which Ray knows it.
        address: at which Ray knows it.
        host_name: that Ray has found on it.
        role: of it; None for anything.
    """

    index: int
    node: Node
    node_id: str
    address: str
    host_name: str
    role: HostRole | None

    @property
    def resource(self) -> str:
        """Ray's resource that pins work to the node."""
        return f"node:{self.address}"


def found_nodes() -> list[ClusterNode]:
    """Every living node: a launch's in its order, else this one first and then by address.

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
    return [_cluster_node(index, node, hosts.get(node["NodeManagerAddress"])) for index, node in enumerate(alive)]


def _cluster_node(index: int, node: Mapping[str, Any], host: Host | None) -> ClusterNode:
    resources, address = node["Resources"], node["NodeManagerAddress"]
    name = address if host is None else host.name
    role = _labelled_role(node) if host is None else host.role
    gpus, slots = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    return ClusterNode(index, Node(name, gpus, slots, role), node["NodeID"], address, node["NodeManagerHostname"], role)


def _labelled_role(node: Mapping[str, Any]) -> HostRole | None:
    role = (node.get("Labels") or {}).get(ROLE_LABEL)
    if role is None or role in ROLES:
        return role  # type: ignore[no-any-return]
    raise UserError(
        f"node {node['NodeManagerAddress']} of the Ray cluster has the label {ROLE_LABEL}={shortened(role)}: expected "
        f"one of {', '.join(ROLES)}"
    )
