"""Models and engines that offload between their turns: their order at the start, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hybridflow.cluster.devices.device_map import Device

if TYPE_CHECKING:
    from hybridflow.roles.groups import ModelGroup, RolloutGroup

type Offloaded = ModelGroup | RolloutGroup
"""A group that can leave its devices."""


def begin_in_turn(offloaded: Sequence[str], devices: Mapping[str, Sequence[Device]]) -> tuple[str, ...]:
    """Return the roles that start one after the other, in order; all others start at the same time.

    A model that is offloaded is on its device while it is built, and has left it before the next one is built and
    before an engine there takes what is free for its KV cache: no start needs more than a step.
    """
    taken = {device for role in offloaded for device in devices[role]}
    return (*offloaded, "rollout") if not taken.isdisjoint(devices.get("rollout", ())) else tuple(offloaded)


def offloaded_groups(
    models: Mapping[str, ModelGroup], offloaded: Sequence[str], engines: RolloutGroup | None, *, release_weights: bool
) -> dict[str, Offloaded]:
    """Return the offloaded groups by role. Other groups release only caches.

    Args:
        models: next to the actor, by role.
        offloaded: roles of models that are offloaded.
        engines: of the run; None without any.
        release_weights: True if the engines release their weights.
    """
    groups: dict[str, Offloaded] = {role: models[role] for role in offloaded}
    return groups | ({"rollout": engines} if engines is not None and release_weights else {})


def offload_metrics(groups: Mapping[str, Offloaded]) -> dict[str, float]:
    """Compute the moves of roles since the last call, by metric name: the slowest rank's time, and bytes of all ranks.

    Args:
        groups: by role.
    """
    pending = {role: group.take_offload_stats() for role, group in groups.items()}
    values: dict[str, float] = {}
    for role, future in pending.items():
        ranks = future.result()
        values[f"memory/{role}_offload_ms"] = 1000 * max(rank.offload_s for rank in ranks)
        values[f"memory/{role}_onload_ms"] = 1000 * max(rank.onload_s for rank in ranks)
        values[f"memory/{role}_offloaded_bytes"] = sum(rank.nbytes for rank in ranks)
    return values
