"""Models and engines that leave their devices to others between their turns: what is refused, and what is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe

if TYPE_CHECKING:
    from hybridflow.roles.groups import ModelGroup, RolloutGroup

type Offloaded = ModelGroup | RolloutGroup
"""A group that can leave its devices."""


def check_offload(recipe: Recipe, devices: Mapping[str, Sequence[Device]]) -> None:
    """Refuse to give back memory that nobody else would use, or that is not an engine's own.

    Args:
        devices: of each role.

    Raises:
        UserError: names the setting.
    """
    settings = {role: f"{role}.offload" for role in recipe.offloaded_roles}
    weights = recipe.rollout.weights
    if recipe.rollout.engine.release_weights and recipe.starts_engines:
        settings["rollout"] = "rollout.engine.release_weights"
    for role, setting in settings.items():
        if _is_alone(role, devices):
            raise UserError(
                f"{setting}=true: no other role computes on the devices of {role}, so that nobody would use the "
                f"memory; expected false, or placement.{role} on devices of another role"
            )
    if "rollout" in settings and (weights.share or weights.transport != "auto"):
        found = "share=true" if weights.share else f"transport={weights.transport}"
        raise UserError(
            f"rollout.engine.release_weights=true with rollout.weights.{found}: expected share=false and "
            "transport=auto: the actor's memory cannot be released, and what is released no other process can write"
        )
    for role in recipe.trained_roles:
        check_overlap(recipe, role, devices)


def check_overlap(recipe: Recipe, role: str, devices: Mapping[str, Sequence[Device]]) -> None:
    """An optimizer's state returns to host memory in the turns of others, where the rest of the model stays.

    Raises:
        UserError: there are none, or the model leaves too.
    """
    if not recipe.train_config(role).optimizer.overlap_offload:
        return
    setting = f"{recipe.train_setting(role)}.optimizer.overlap_offload=true"
    if role in recipe.offloaded_roles:
        raise UserError(f"{setting} does nothing with {role}.offload=true, which waits for all of it; expected false")
    if _is_alone(role, devices):
        raise UserError(
            f"{setting}: nothing else is on placement.{role}, in whose turns it would return; expected false"
        )


def _is_alone(role: str, devices: Mapping[str, Sequence[Device]]) -> bool:
    """Whether no other role computes on a role's devices."""
    others = {device for other, held in devices.items() if other not in (role, "reward") for device in held}
    return others.isdisjoint(devices[role])


def begin_in_turn(offloaded: Sequence[str], devices: Mapping[str, Sequence[Device]]) -> tuple[str, ...]:
    """The roles that start one after the other, in order; all others start beside them.

    A model that is offloaded is on its device while it is built, and has left it before the next one is built and
    before an engine there takes what is free for its KV cache: no start needs more than a step.
    """
    taken = {device for role in offloaded for device in devices[role]}
    return (*offloaded, "rollout") if not taken.isdisjoint(devices.get("rollout", ())) else tuple(offloaded)


def offloaded_groups(
    recipe: Recipe, models: Mapping[str, ModelGroup], rollout: RolloutGroup | None
) -> dict[str, Offloaded]:
    """Of the models beside the actor and the engines, those that give back more than what they only cache, by role."""
    groups: dict[str, Offloaded] = {role: models[role] for role in recipe.offloaded_roles}
    return groups | ({"rollout": rollout} if rollout is not None and recipe.rollout.engine.release_weights else {})


def offload_metrics(groups: Mapping[str, Offloaded]) -> dict[str, float]:
    """What some roles have moved since the last call, by metric name: the slowest rank's time, and bytes of all ranks.

    Args:
        groups: by role.
    """
    asked = {role: group.take_offload_figures() for role, group in groups.items()}
    values: dict[str, float] = {}
    for role, future in asked.items():
        ranks = future.result()
        values[f"memory/{role}_offload_ms"] = 1000 * max(rank.away_s for rank in ranks)
        values[f"memory/{role}_onload_ms"] = 1000 * max(rank.back_s for rank in ranks)
        values[f"memory/{role}_offloaded_bytes"] = sum(rank.nbytes for rank in ranks)
    return values
