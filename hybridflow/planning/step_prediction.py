"""Prediction of a step of a recipe as it is written, on the devices that it has: for the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine3d.cleaning import cleaning
from engine3d.errors import UserError
from engine3d.platform import platform
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe
from hybridflow.data.prompts import Prompts
from hybridflow.planning.memory.estimate import recipe_specs
from hybridflow.planning.search.recipe_work import (
    check_planned_for,
    fixed_engines,
    mean_response,
    recipe_work,
)
from hybridflow.planning.search.run_plan import ROLLOUT
from hybridflow.planning.time.hardware import Profile, cpu_profile, matching_profile, this_machine
from hybridflow.planning.time.phases import RoleLayout, phase_costs
from hybridflow.planning.time.step import step_seconds
from hybridflow.rundir.predicted_seconds import PredictedSeconds, write_predicted_seconds


def record_prediction(recipe: Recipe, devices: Mapping[str, Sequence[Device]], train: Prompts, directory: Path) -> None:
    """Write the predicted seconds of a step into a run's directory; nothing where no shipped profile fits.

    Args:
        recipe: the run.
        devices: of each role.
        train: prompts to train on, with the responses that the data have.
        directory: of the run.
    """
    profile = matching_profile(this_machine())
    if profile is None or not len(train):
        return
    slots = max(1, len(frozenset[Device]().union(*devices.values())))
    profile = profile.with_cluster(platform.gpus) if platform.gpus else cpu_profile(slots)
    prompt_tokens = sum(map(len, train.tokens)) / len(train)
    predicted = predicted_seconds(recipe, devices, profile, prompt_tokens, mean_response(train))
    if predicted is not None:
        with cleaning("hybridflow: the predicted seconds could not be recorded", needed=False):
            write_predicted_seconds(directory, predicted)


def predicted_seconds(
    recipe: Recipe,
    devices: Mapping[str, Sequence[Device]],
    profile: Profile,
    prompt_tokens: float,
    response_tokens: float | None = None,
) -> PredictedSeconds | None:
    """Predict the seconds of a step; None for a recipe whose step no model predicts.

    Args:
        recipe: the run.
        devices: of each role.
        profile: of the devices.
        prompt_tokens: mean of the training prompts.
        response_tokens: mean of the responses that the data have; None where engines generate them.
    """
    try:
        check_planned_for(recipe.megatron_roles.values(), recipe.served_roles, lease=recipe.rollout.lease)
        work = recipe_work(
            recipe,
            recipe_specs(recipe),
            prompt_tokens=max(1, round(prompt_tokens)),
            response_tokens=response_tokens,
        )
    except UserError:
        return None
    if any(role.role not in devices for role in work.roles):
        return None
    layouts = {
        role.role: RoleLayout(role.config.layout.layout(len(devices[role.role])), role.config) for role in work.roles
    }
    engines = None
    if recipe.starts_engines and ROLLOUT in devices:
        engines = fixed_engines(recipe.rollout, len(devices[ROLLOUT]))
    models = {role: frozenset(devices[role]) for role in [*layouts, *([ROLLOUT] if engines is not None else [])]}
    costs = phase_costs(
        work,
        profile.hardware,
        layouts,
        engines,
        colocated=engines is not None and bool(models[ROLLOUT] & models["actor"]),
        shared=recipe.rollout.weights.share,
    )
    groups = _sharing(models)
    step = step_seconds(
        costs.seconds,
        groups,
        staleness=work.staleness if frozenset({ROLLOUT}) in groups else 0,
        stream=recipe.rollout.stream is not None,
    )
    seconds = {phase: value for phase, value in step.phases.items() if value > 0 and phase in profile.interval}
    total = sum(seconds.values())
    intervals = {phase: profile.interval[phase] for phase in seconds}
    intervals["step"] = sum(intervals[phase] * value for phase, value in seconds.items()) / total if total else 0.0
    return PredictedSeconds(profile.name, work.response, seconds | {"step": step.step}, intervals)


def _sharing(devices: Mapping[str, frozenset[Device]]) -> list[frozenset[str]]:
    """Group roles that have a device in common."""
    groups: list[tuple[frozenset[str], frozenset[Device]]] = []
    for role, of_role in devices.items():
        joined = [group for group in groups if group[1] & of_role]
        groups = [group for group in groups if not group[1] & of_role]
        roles = frozenset({role}).union(*(group[0] for group in joined))
        groups.append((roles, of_role.union(*(group[1] for group in joined))))
    return [roles for roles, _ in groups]
