"""Devices of engines and servers whose weights stay as they are: a judge's, and a teacher's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device


def check_served_devices(
    role: str, tp: int, devices: Mapping[str, Sequence[Device]], beside: Collection[str] = ()
) -> int:
    """Whether a role has devices of its own, a whole number of engines, and each engine's on one node.

    Args:
        role: of the engines.
        tp: devices of each.
        devices: of every role.
        beside: roles that take nothing of a device, and may be on one of these.

    Returns:
        The number of engines.

    Raises:
        UserError: naming the placement.
    """
    own = devices[role]
    for other, held in devices.items():
        if other != role and other not in beside and (shared := sorted(set(held) & set(own))):
            raise UserError(
                f"placement.{role} and placement.{other} are both on {shared[0].kind}:{shared[0].index} of node "
                f"{shared[0].node}, expected devices of its own for the {role}"
            )
    each = [{device.node for device in own[first : first + tp]} for first in range(0, len(own), tp)]
    if len(own) % tp or any(len(nodes) > 1 for nodes in each):
        raise UserError(
            f"placement.{role}: {len(own)} devices for engines of {role}.engine.tp={tp}, expected a multiple, and the "
            "devices of each on one node"
        )
    return len(each)
