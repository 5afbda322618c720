"""Resolution of `train.layout: auto` and `placement: auto`, before a recipe is built."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.platform import platform
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.config.actors import ACTORS
from hybridflow.config.reading.yaml_loader import build_settings, read_with_overrides
from hybridflow.config.recipe import Recipe
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.planning.memory.estimate import recipe_specs
from hybridflow.planning.search.placements import PlacementSearch
from hybridflow.planning.search.plan_text import interval
from hybridflow.planning.search.recipe_work import (
    fixed_engines,
    layout_override,
    plan_overrides,
    recipe_work,
    search_settings,
)
from hybridflow.planning.search.run_plan import ROLLOUT, RoleGroup, RunPlan
from hybridflow.planning.time.hardware import (
    Profile,
    cpu_profile,
    load_profile,
    matching_profile,
    shipped_profiles,
    this_machine,
)

AUTO = "auto"
_MOST_SLOTS = 4
"""CPU slots of a machine without GPUs that a placement is searched on."""


def resolved(path: Path, overrides: Sequence[str], nodes: Sequence[Node] | None) -> tuple[list[str], str]:
    """Resolve what a recipe leaves to the search.

    Args:
        path: of the recipe.
        overrides: of the command.
        nodes: to run on; this machine if None.

    Returns:
        Further overrides, and the line that says what was chosen.

    Raises:
        UserError: there is no profile of the GPUs, or nothing fits.
    """
    data, locations = read_with_overrides(path, overrides)
    autos = _autos(data)
    if ACTORS in data:
        raise UserError(f"{autos[0]}: auto with several actors, which was not tried; expected devices and layouts")
    recipe = build_settings(Recipe, without_autos(data), locations, str(path))
    profile, gpus = _hardware(nodes, autos[0])
    specs = recipe_specs(recipe)
    settings = search_settings(recipe, specs, gpus_per_node=profile.hardware.gpus_per_node, gpus=profile.gpu != "cpu")
    if "placement" in autos:
        plan = PlacementSearch(recipe_work(recipe, specs), profile, settings).best(gpus, 1)[0]
        kind = "cpu" if profile.gpu == "cpu" else "cuda"
        chosen = [
            "placement={}",
            "train.layout={}",
            *plan_overrides(recipe.placement, recipe.rollout.engine, plan, kind=kind),
        ]
    else:
        devices = planned_devices(recipe.device_maps, recipe.placement, nodes)
        if devices is None:
            raise UserError("train.layout: auto with placement.cluster, which was not tried; expected a layout")
        groups = _groups(recipe.megatron_roles, devices)
        engines = fixed_engines(recipe.rollout, len(devices[ROLLOUT])) if ROLLOUT in devices else None
        settings = replace(settings, engines=engines, keeps_settings=True)
        search = PlacementSearch(recipe_work(recipe, specs), profile, settings)
        fitting = search.on_groups(groups)
        if fitting is None:
            raise UserError(f"train.layout: auto: {(search.refusals or ['no layout fits next to the engines'])[0]}")
        plan, chosen = fitting, [layout_override(fitting)]
    return chosen, _line(autos, plan, profile)


def without_autos(data: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's data with the defaults in place of what is left to the search."""
    data = {name: value for name, value in data.items() if name != "placement" or value != AUTO}
    train = data.get("train")
    if isinstance(train, dict) and train.get("layout") == AUTO:
        data["train"] = {name: value for name, value in train.items() if name != "layout"}
    return data


def _autos(data: dict[str, Any]) -> list[str]:
    train = data.get("train")
    autos = ["placement"] if data.get("placement") == AUTO else []
    return autos + (["train.layout"] if isinstance(train, dict) and train.get("layout") == AUTO else [])


def _hardware(nodes: Sequence[Node] | None, setting: str) -> tuple[Profile, int]:
    """Return the profile of the devices and their number."""
    per_node = platform.gpus if nodes is None else max((node.gpus for node in nodes), default=0)
    if not per_node:
        here = min(_MOST_SLOTS, os.cpu_count() or 1)
        slots = [here] if nodes is None else [node.cpu_slots for node in nodes]
        return cpu_profile(max([1, *slots])), max(1, sum(slots))
    gpus = per_node if nodes is None else sum(node.gpus for node in nodes)
    if not platform.gpus:
        return load_profile("h200").with_cluster(per_node), gpus
    profile = matching_profile(machine := this_machine())
    if profile is None:
        shipped = (load_profile(name).gpu for name in shipped_profiles())
        known = ", ".join(gpu for gpu in shipped if gpu != "cpu")
        raise UserError(
            f"{setting}: auto on {machine['gpu']}, of which no profile ships ({known}); expected devices and a layout, "
            "such as those of hybridflow plan --gpus FILE.yaml:8"
        )
    return profile.with_cluster(per_node), gpus


def _groups(megatron_roles: Collection[str], devices: Mapping[str, Sequence[Device]]) -> tuple[RoleGroup, ...]:
    """Group the roles of a recipe by their devices; engines may be on some of the devices of models.

    Raises:
        UserError: models share some of their devices and not all.
    """
    models = [role for role in devices if role in megatron_roles]
    sets = [frozenset(devices[role]) for role in models]
    if ROLLOUT in devices and not any(frozenset(devices[ROLLOUT]) & group for group in sets):
        sets.append(frozenset(devices[ROLLOUT]))
    sets = list(dict.fromkeys(sets))
    if sum(map(len, sets)) > len(frozenset().union(*sets)):
        raise UserError("train.layout: auto with models that share some of their devices; expected all, or others")
    groups, first = [], 0
    for group in sets:
        roles = [role for role in models if frozenset(devices[role]) == group]
        roles += [ROLLOUT] if group & frozenset(devices.get(ROLLOUT, ())) else []
        groups.append(RoleGroup(tuple(roles), first, len(group)))
        first += len(group)
    return tuple(groups)


def _line(autos: Sequence[str], plan: RunPlan, profile: Profile) -> str:
    width = interval(plan, profile)["step"]
    step = plan.step.step
    layouts = [f"{role} {proposal.layout}" for role, proposal in plan.roles.items()]
    engines = [f"rollout {plan.engines.shape}"] if plan.engines is not None else []
    return (
        f"{' and '.join(autos)}: auto: {plan.kind}, {', '.join([*layouts, *engines])}; {step:.1f} s a step foreseen "
        f"({step * (1 - width):.1f} to {step * (1 + width):.1f}, {profile.name})"
    )
