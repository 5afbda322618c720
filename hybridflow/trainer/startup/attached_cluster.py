"""The look at the nodes of `placement.cluster`, before anything of a run is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.hosts.checks.comparison import Needs
from hybridflow.cluster.hosts.checks.preflight import PreflightPlan
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.runtime import ray_runtime
from hybridflow.cluster.runtime.attached_hosts import check_nodes
from hybridflow.cluster.runtime.cluster_nodes import ClusterNode, found_nodes
from hybridflow.config.run import PlacementConfig
from hybridflow.errors.log import log


def check_cluster_of(placement: PlacementConfig, roles: Mapping[str, str], run_dir: Path, limits: LimitsConfig) -> None:
    """Look at the nodes on which the run would be, where there are several; nothing where Ray is started for the run.

    Args:
        placement: with the cluster.
        roles: the device map or pool of every role.
        run_dir: directory of runs, which the nodes are to see.
        limits: of calls.

    Raises:
        UserError: there is no such cluster, its nodes do not fulfil the placement, or something is wrong with which the
            run would fail.
        EngineError: a node does not answer.
    """
    if placement.cluster is None:
        return
    with _attached(placement.cluster, limits):
        nodes = found_nodes()
        devices = pool_devices(roles, placement.pools, [node.node for node in nodes])
        used = {0} | {device.node for of_role in devices.values() for device in of_role}
        if len(used) > 1:
            gpus = any(device.kind == "cuda" for of_role in devices.values() for device in of_role)
            check_nodes([nodes[number] for number in sorted(used)], _plan(run_dir, gpus), limits=limits)


def doctor(placement: PlacementConfig, roles: Mapping[str, str], run_dir: Path, limits: LimitsConfig) -> None:
    """Look at every node of `placement.cluster`, show the table, and check that the placement fits.

    Args and errors as of `check_cluster_of`.
    """
    with _attached(placement.cluster, limits):
        nodes = found_nodes()
        check_nodes(nodes, _plan(run_dir, _any_gpu(nodes)), limits=limits, with_table=True)
        pool_devices(roles, placement.pools, [node.node for node in nodes])


@contextmanager
def _attached(cluster: str | None, limits: LimitsConfig) -> Iterator[None]:
    log.info(f"looking at the Ray cluster {cluster}")
    ray_runtime.start_ray(address=cluster, limits=limits)
    try:
        yield
    finally:
        ray_runtime.stop_ray()


def _any_gpu(nodes: Sequence[ClusterNode]) -> bool:
    return any(node.node.gpus for node in nodes)


def _plan(run_dir: Path, gpus: bool) -> PreflightPlan:
    # Others may hold GPUs of the cluster that the run does not use. Those that it gets are looked at when it has them.
    return PreflightPlan(run_dir, needs=Needs(gpus=gpus, shared_gpus=True))
