"""The devices that Ray holds for each role.

A role runs on a `ResourcePool`: devices in order, one bundle of a Ray placement group each. Roles whose pools share
devices share the bundles, and so the GPUs; the others run at the same time on their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.cluster.ray.cluster_nodes import cluster_hosts
from hybridflow.cluster.ray.ray_session import ray_answers, started_hosts


@dataclass(frozen=True, slots=True)
class Bundle:
    """One device as Ray holds it."""

    device: Device
    group: PlacementGroup
    index: int
    """Index of the bundle in its placement group."""
    visible: str
    """The device as CUDA_VISIBLE_DEVICES names it; empty for a CPU slot."""

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Schedules an actor or task onto this device."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """The devices of a role, in the order of its ranks."""

    name: str
    bundles: tuple[Bundle, ...]
    neighbours: tuple[Bundle, ...] = ()
    """Every other device that the run holds."""

    def __len__(self) -> int:
        return len(self.bundles)

    def visible_devices(self, node: int) -> str:
        """CUDA_VISIBLE_DEVICES on `node`: the pool's GPUs there, then the run's others. Empty on CPU slots."""
        if self.bundles[0].device.kind == "cpu":
            return ""
        return ",".join(
            bundle.visible
            for bundle in (*self.bundles, *self.neighbours)
            if bundle.device.node == node and bundle.visible
        )


def cluster_nodes() -> list[Node]:
    """The machines of the cluster: a launch's in its order, else this one first and then by address.

    Raises:
        UserError: a node has a label for a role that there is not.
    """
    return [host.node for host in cluster_hosts()]


def reserve(devices: Mapping[str, tuple[Device, ...]], timeout_s: float = 60.0) -> dict[str, ResourcePool]:
    """Reserve the devices of every role in Ray, each device once, and return the pool of each role.

    On a Ray that this process started, GPU indices are the machine's own. In a cluster that others use too they count
    the GPUs that Ray grants on the node.

    Args:
        devices: role -> devices, from `hybridflow.cluster.devices.device_map.pool_devices`.
        timeout_s: how long Ray may take to find them free.

    Raises:
        EngineError: they are not free within `timeout_s`.
    """
    hosts = cluster_hosts()
    bundles: dict[Device, Bundle] = {}
    groups: list[PlacementGroup] = []
    requested = sorted({device for of_role in devices.values() for device in of_role})
    for number in sorted({device.node for device in requested}):
        here = [device for device in requested if device.node == number]
        needs = [{"CPU": 1.0} | ({"GPU": 1.0} if device.kind == "cuda" else {}) for device in here]
        needs[0] = needs[0] | {f"node:{hosts[number].address}": 0.001}
        group = placement_group(needs, strategy="STRICT_PACK")
        groups.append(group)
        if not group.wait(timeout_s):
            for reserved in groups:
                remove_placement_group(reserved)
            raise EngineError(
                f"placement: {len(here)} devices of {hosts[number].name} were not free within {timeout_s:.0f} s: "
                f"{_summary(needs)}; the cluster has {_summary([ray.available_resources()])} free"
            )
        for index, device in enumerate(here):
            bundles[device] = Bundle(device, group, index, _visible(device, group, index, timeout_s))
    return {
        role: ResourcePool(
            role,
            tuple(bundles[device] for device in of_role),
            tuple(bundle for device, bundle in bundles.items() if device not in of_role),
        )
        for role, of_role in devices.items()
    }


def release(pools: Mapping[str, ResourcePool]) -> None:
    """Give the devices of the pools back to Ray, if it is still there."""
    if not ray_answers():
        return
    with cleaning("hybridflow: placement"):
        for group in {bundle.group.id: bundle.group for pool in pools.values() for bundle in pool.bundles}.values():
            remove_placement_group(group)


def _visible(device: Device, group: PlacementGroup, index: int, timeout_s: float) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a device."""
    if device.kind == "cpu":
        return ""
    if (hosts := started_hosts()) is not None:
        inherited = hosts[device.node].visible
        return inherited.split(",")[device.index].strip() if inherited else str(device.index)
    granted = _granted_gpu.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
    try:
        return ray.get(granted, timeout=timeout_s)
    except GetTimeoutError:
        raise EngineError(
            f"placement: Ray did not say within {timeout_s:g} s which GPU it granted for {device}"
        ) from None


@ray.remote(num_cpus=0, num_gpus=1)
def _granted_gpu() -> str:
    return str(ray.get_gpu_ids()[0])


def _summary(resources: Sequence[Mapping[str, float]]) -> str:
    total = {name: sum(resource.get(name, 0) for resource in resources) for name in ("CPU", "GPU")}
    return " and ".join(f"{int(count)} {name}s" for name, count in total.items() if count) or "nothing"
