"""What can be found wrong with a recipe of several actors: with each, and with all at once on the same nodes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from engine3d.errors import amount
from engine3d.platform import platform
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.cluster.hosts.checks.host_memory import machine_bytes
from hybridflow.config.recipe import Recipe
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.planning.memory_ledger import Ledger
from hybridflow.planning.memory_report import recipe_ledger
from hybridflow.planning.placement_check import planned_devices
from hybridflow.planning.recipe_check import check_recipe


def check_actors(recipes: Mapping[str, Recipe], cluster: Sequence[Node] | None = None, **options: Any) -> list[str]:
    """Check the recipe of each actor, and that all have devices, checkpoints and memory of their own.

    Args:
        recipes: of each actor, by its name.
        cluster: nodes to run on; None for this machine.
        options: as `check_recipe` takes them.

    Returns:
        What only makes a run slower, a line each.

    Raises:
        SettingsError: with one line for every error found.
    """
    errors: list[str] = []
    warnings: list[str] = []
    for name, recipe in recipes.items():
        try:
            warnings += [f"actor {name}: {line}" for line in check_recipe(recipe, cluster, **options)]
        except SettingsError as error:
            errors += [f"actor {name}: {line}" for line in error.lines]
        if recipe.placement.cluster is not None:
            errors.append(
                f"actor {name}: placement.cluster is set; several actors were tried on one machine alone, expected none"
            )
    if not errors:
        errors += [*_shared_devices(recipes, cluster), *_shared_directories(recipes)]
    if not errors and options.get("must_fit", True):
        errors += _too_large(recipes, cluster, options.get("host_bytes"))
    if errors:
        raise SettingsError(list(dict.fromkeys(errors)))
    return warnings


def _shared_devices(recipes: Mapping[str, Recipe], cluster: Sequence[Node] | None) -> list[str]:
    held: dict[Device, tuple[str, str]] = {}
    found = []
    for name, recipe in recipes.items():
        for role, devices in (planned_devices(recipe, cluster) or {}).items():
            for device in devices:
                first, first_role = held.setdefault(device, (name, role))
                if first != name:
                    where = f"{device.kind}:{device.index} of node {device.node}"
                    found.append(
                        f"actor {name}: placement.{role} has {where}, as placement.{first_role} of actor {first}; "
                        "actors learn at the same time, expected devices of its own"
                    )
    return found


def _shared_directories(recipes: Mapping[str, Recipe]) -> list[str]:
    found = []
    for (one, first), (other, second) in itertools.combinations(recipes.items(), 2):
        if first.checkpoint_directory == second.checkpoint_directory:
            found.append(
                f"actor {other}: checkpoint.dir={second.checkpoint_directory} is that of actor {one}, expected another"
            )
        if second.resume not in ("none", "auto") and first.resume == second.resume:
            found.append(f"actor {other}: resume={second.resume} is that of actor {one}, expected auto or its own")
    return found


def _too_large(recipes: Mapping[str, Recipe], cluster: Sequence[Node] | None, host_bytes: int | None) -> list[str]:
    """Where each has room for itself, and all together have not."""
    host_bytes = machine_bytes() if host_bytes is None and cluster is None else host_bytes
    if host_bytes is None:
        return []
    gpu_gb = None if platform.gpus else 1e9  # no limit: devices are each actor's own, and have been looked at
    ledgers = {name: recipe_ledger(recipe, cluster, gpu_gb) for name, recipe in recipes.items()}
    return list(_beyond(ledgers, host_bytes))


def _beyond(ledgers: Mapping[str, Ledger], host_bytes: int) -> list[str]:
    found = []
    for node in range(max(len(ledger.hosts) for ledger in ledgers.values())):
        taken = {name: ledger.hosts[node].total for name, ledger in ledgers.items() if node < len(ledger.hosts)}
        if (total := sum(taken.values())) > host_bytes:
            each = ", ".join(f"{name} {amount(size, 1)}" for name, size in taken.items())
            found.append(
                f"node {node}: the actors take {amount(total, 1)} of host memory ({each}), on a node of "
                f"{amount(host_bytes, 1)}"
            )
    return found
