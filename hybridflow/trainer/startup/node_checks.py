"""Checks of the nodes of a run, before anything of it is there: hosts of a launch, or nodes of `placement.cluster`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.driver_link import driver_link
from hybridflow.cluster.hosts.checks.facts import Needs
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.network.network_settings import NetworkConfig
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.ray import ray_session
from hybridflow.cluster.ray.cluster_nodes import cluster_hosts
from hybridflow.cluster.ray.host_checks import check_hosts, check_this_host
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log
from hybridflow.planning.checks.shared_disk import check_shared_disks, shared_files
from hybridflow.roles.config import PlacementConfig


def check_nodes_of(recipe: Recipe) -> None:
    """Check the nodes on which the run would be, where there are several. The session stays open for the run.

    Raises:
        UserError: there is no such cluster, its nodes do not fulfil the placement, or something is wrong with which the
            run would fail.
        EngineError: Ray did not start, or a node does not answer.
    """
    _open_session(recipe.placement, recipe.limits)
    try:
        hosts = cluster_hosts()
        devices = pool_devices(recipe.device_maps, recipe.placement.pools, [host.node for host in hosts])
        used = {0} | {device.node for of_role in devices.values() for device in of_role}
        if driver_link() is not None:
            used = set(range(len(hosts)))
        if len(used) > 1:
            gpus = any(device.kind == "cuda" for of_role in devices.values() for device in of_role)
            _check(recipe, [hosts[number] for number in sorted(used)], gpus=gpus)
    except BaseException:
        ray_session.stop_ray()
        raise


def doctor(recipe: Recipe) -> None:
    """Check every node and show the table, and check that the placement fits.

    Errors as of `check_nodes_of`.
    """
    link = driver_link()
    if recipe.placement.cluster is None and (link is None or len(link.hosts) == 1):
        gpus = _use_gpus({**recipe.device_maps, **recipe.placement.pools}.values())
        check_this_host(recipe.run_dir, _needs(recipe.placement, recipe.network, gpus=gpus))
        return
    _open_session(recipe.placement, recipe.limits)
    try:
        hosts = cluster_hosts()
        _check(recipe, hosts, gpus=any(host.gpus for host in hosts), with_table=True)
        pool_devices(recipe.device_maps, recipe.placement.pools, [host.node for host in hosts])
    finally:
        ray_session.stop_ray()


def _open_session(placement: PlacementConfig, limits: LimitsConfig) -> None:
    if placement.cluster is not None:
        log.info(f"looking at the Ray cluster {placement.cluster}")
    ray_session.start_ray(address=placement.cluster, limits=limits)


def _check(recipe: Recipe, hosts: Sequence[Host], *, gpus: bool, with_table: bool = False) -> None:
    link = driver_link()
    # A restart measures no rates again.
    rates = link is None or link.is_first
    needs = _needs(recipe.placement, recipe.network, gpus=gpus)
    check_hosts(hosts, recipe.run_dir, needs, rates=rates, limits=recipe.limits, with_table=with_table)
    if link is not None:
        check_shared_disks(
            shared_files(recipe),
            recipe.device_maps,
            recipe.placement,
            link.hosts,
            ray_session.session_state().apart,
            checkpoints=recipe.checkpoint.dir,
        )


def _needs(placement: PlacementConfig, network: NetworkConfig, *, gpus: bool) -> Needs:
    # Others may hold GPUs of a running cluster that the run does not use. Those that it gets are looked at when it has
    # them.
    shared = placement.shared_gpus or placement.cluster is not None
    return Needs(gpus=gpus, shared_gpus=shared, locks_memory=network.locks_memory)


def _use_gpus(device_maps: Iterable[str]) -> bool:
    """True if a device map may mean GPUs, as all devices of a host do that has some; a function takes a CPU slot."""
    return any(word in text for text in device_maps for word in ("cuda", "role:", "node:") if text != "role:reward")
