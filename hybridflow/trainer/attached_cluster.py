"""The look at the nodes of `placement.cluster`, before anything of a run is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.hosts.checks.comparison import Needs
from hybridflow.cluster.hosts.checks.preflight import PreflightPlan
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.runtime import ray_runtime
from hybridflow.cluster.runtime.attached_hosts import check_nodes
from hybridflow.cluster.runtime.cluster_nodes import ClusterNode, found_nodes
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log


def check_cluster_of(recipe: Recipe) -> None:
    """Look at the nodes on which the run would be, where there are several; nothing where Ray is started for the run.

    Raises:
        UserError: there is no such cluster, its nodes do not fulfil the placement, or something is wrong with which the
            run would fail.
        EngineError: a node does not answer.
    """
    if recipe.placement.cluster is None:
        return
    with _attached(recipe.placement.cluster, recipe.limits):
        nodes = found_nodes()
        roles = recipe.device_maps
        devices = pool_devices(roles, recipe.placement.pools, [each.node for each in nodes])
        used = {0} | {device.node for held in devices.values() for device in held}
        if len(used) > 1:
            gpus = any(device.kind == "cuda" for held in devices.values() for device in held)
            check_nodes([nodes[number] for number in sorted(used)], _plan(recipe.run_dir, gpus), limits=recipe.limits)


def doctor(recipe: Recipe) -> None:
    """Look at every node of `placement.cluster`, show the table, and say whether the placement fits.

    Raises as `check_cluster_of`.
    """
    with _attached(recipe.placement.cluster, recipe.limits):
        nodes = found_nodes()
        check_nodes(nodes, _plan(recipe.run_dir, _any_gpu(nodes)), limits=recipe.limits, with_table=True)
        roles = recipe.device_maps
        pool_devices(roles, recipe.placement.pools, [each.node for each in nodes])


@contextmanager
def _attached(cluster: str | None, limits: LimitsConfig) -> Iterator[None]:
    log.info(f"looking at the Ray cluster {cluster}")
    ray_runtime.start_ray(address=cluster, limits=limits)
    try:
        yield
    finally:
        ray_runtime.stop_ray()


def _any_gpu(nodes: Sequence[ClusterNode]) -> bool:
    return any(each.node.gpus for each in nodes)


def _plan(run_dir: Path, gpus: bool) -> PreflightPlan:
    # Others may hold GPUs of the cluster that the run does not use. Those that it gets are looked at when it has them.
    return PreflightPlan(run_dir, needs=Needs(gpus=gpus, shared_gpus=True))
