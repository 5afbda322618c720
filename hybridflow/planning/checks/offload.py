"""Checks of models and engines that offload between their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device
from hybridflow.roles.config import MegatronRole
from hybridflow.rollout.config import RolloutRole


def check_offload(
    models: Mapping[str, MegatronRole], rollout: RolloutRole | None, devices: Mapping[str, Sequence[Device]]
) -> None:
    """Refuse to release memory that no other role would use, or that the engine does not own.

    Args:
        models: the actor and every Megatron-Core model next to it, by role.
        rollout: settings of the engines; None where none generate.
        devices: of each role.

    Raises:
        UserError: names the setting.
    """
    settings = {role: f"{role}.offload" for role, model in models.items() if model.offload}
    if rollout is not None and rollout.engine.release_weights:
        settings["rollout"] = "rollout.engine.release_weights"
    for role, setting in settings.items():
        if _is_alone(role, devices):
            raise UserError(
                f"{setting}=true: no other role computes on the devices of {role}, so that nobody would use the "
                f"memory; expected false, or placement.{role} on devices of another role"
            )
    weights = rollout.weights if rollout is not None else None
    if "rollout" in settings and weights is not None and (weights.share or weights.transport != "auto"):
        setting_of_weights = "share=true" if weights.share else f"transport={weights.transport}"
        raise UserError(
            f"rollout.engine.release_weights=true with rollout.weights.{setting_of_weights}: expected share=false and "
            "transport=auto: the actor's memory cannot be released, and what is released no other process can write"
        )
    for model in models.values():
        if model.trained:
            check_overlap(model, devices)


def check_overlap(role: MegatronRole, devices: Mapping[str, Sequence[Device]]) -> None:
    """Check `overlap_offload`: an optimizer's state returns to host memory in the turns of other roles.

    Raises:
        UserError: there are none, or the model leaves too.
    """
    if not role.train.optimizer.overlap_offload:
        return
    setting = f"{role.setting}.optimizer.overlap_offload=true"
    if role.offload:
        raise UserError(
            f"{setting} does nothing with {role.name}.offload=true, which waits for all of it; expected false"
        )
    if _is_alone(role.name, devices):
        raise UserError(
            f"{setting}: nothing else is on placement.{role.name}, in whose turns it would return; expected false"
        )


def _is_alone(role: str, devices: Mapping[str, Sequence[Device]]) -> bool:
    """True if no other role computes on a role's devices."""
    others = {device for other, used in devices.items() if other not in (role, "reward") for device in used}
    return others.isdisjoint(devices[role])
