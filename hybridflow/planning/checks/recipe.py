"""Everything that can be found wrong with a recipe, or with those of several actors, without starting anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine3d.dtypes import ITEMSIZES
from engine3d.errors import UserError, amount
from engine3d.memory.serving import routes_of_a_token
from engine3d.models import ModelSpec
from engine3d.platform import platform
from hybridflow.checkpoint.compatibility import check_accepted
from hybridflow.checkpoint.resume import check_checkpoint_directory, find_resumption
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.cluster.devices.gpu_availability import check_gpus_free
from hybridflow.cluster.hosts.checks.facts import machine_bytes
from hybridflow.cluster.hosts.checks.host_check import check_directories, check_room, check_writable
from hybridflow.cluster.hosts.network.network_settings import check_used
from hybridflow.cluster.ray.cluster_address import check_cluster_answers
from hybridflow.cluster.ray.ray_host import check_authentication
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.reading.recipe_paths import explained
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe
from hybridflow.metrics.sinks.trackers import check_trackers
from hybridflow.metrics.sinks.wandb_sink import check_wandb
from hybridflow.planning.checks.engine import check_sampling, precision_notes
from hybridflow.planning.checks.environment import check_environment
from hybridflow.planning.checks.feature_matrix import RunFeatures, check_tested
from hybridflow.planning.checks.gpu import check_imports, check_libraries, largest_gpu, used_gpus
from hybridflow.planning.checks.model import (
    check_engines,
    check_judge,
    check_model,
    check_model_files,
    check_teacher_engine,
    with_fp8_settings,
)
from hybridflow.planning.checks.offload import check_offload
from hybridflow.planning.checks.placement import check_engine_devices, check_layouts, groups_over_nodes, planned_devices
from hybridflow.planning.checks.prompt import EncodedPrompts, encoded_prompts
from hybridflow.planning.checks.reward import check_rewards, check_set_rewards
from hybridflow.planning.memory.estimate import foresee, recipe_ledger
from hybridflow.planning.memory.ledger import MemoryLedger
from hybridflow.planning.memory.samples import check_kept_routes, check_replay, store_notes
from hybridflow.roles.config import CreateModel, PlacementConfig


def check_recipe(
    recipe: Recipe,
    cluster: Sequence[Node] | None = None,
    *,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    must_fit: bool = True,
    here: bool | None = None,
    dry_run: bool = False,
) -> list[str]:
    """Check placement, layouts, model files, prompts, checkpoints, reward functions and sinks of a recipe.

    What depends on another machine is left to the run: a cluster's devices where `placement.cluster` names one.

    Args:
        recipe: what is to run.
        cluster: nodes to run on; None for this machine.
        gpu_bytes: memory of each GPU; if None, what this machine's largest has, and unknown of other nodes.
        host_bytes: memory of each node; if None, what this machine has, and unknown of other nodes.
        here: whether this machine is one of the nodes; if None, where none are given.
        dry_run: nothing starts afterwards: import all libraries that roles import on GPUs of this machine, see
            `check_imports`, and return what a run would log of its resumption.
        must_fit: whether to refuse models that a GPU or a node has no room for, whatever the engines take.

    Returns:
        What only makes the run slower, prompts that are too long for it, and the resumption, a line each.

    Raises:
        SettingsError: with one line for every error found.
    """
    errors: list[str] = []
    warnings: list[str] = []
    here = cluster is None if here is None else here

    def attempt(check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except UserError as error:
            errors.append(explained(str(error), recipe))
            return None

    engines = recipe.rollout if recipe.starts_engines else None
    attempt(check_authentication)
    attempt(check_used, recipe.network, 1 if cluster is None else len(cluster), recipe.placement.cluster)
    encoded: EncodedPrompts | None = None
    spec = attempt(initial_spec, recipe.model)
    attempt(check_accepted, recipe.checkpoint.accept, recipe.algorithm)
    resumption: list[str] = []
    if attempt(check_checkpoint_directory, recipe.checkpoint, recipe.checkpoint_directory) and spec is not None:
        _, resumption = attempt(find_resumption, recipe) or (None, [])
    specs = {"actor": spec}
    for role, model in recipe.models.items():
        specs[role], notes = attempt(check_model, model, role, recipe.algorithm, spec) or (None, [])
        warnings += notes
    devices = attempt(planned_devices, recipe.device_maps, recipe.placement, cluster)
    for role, settings in recipe.megatron_roles.items():
        engine = recipe.rollout.engine if role == "actor" and recipe.starts_engines else None
        specs[role] = attempt(with_fp8_settings, specs[role], settings.train, settings.setting, engine)
    spec = specs["actor"]
    layouts = attempt(check_layouts, recipe, devices, specs) if devices is not None else None
    if layouts is not None:
        features = RunFeatures(engines, recipe.checkpoint.save_interval, recipe.environment is not None)
        attempt(check_tested, recipe.megatron_roles, specs, layouts, features)
    if devices is not None and layouts is not None and cluster is not None:
        warnings += groups_over_nodes(layouts, devices, cluster)
    if devices is not None:
        attempt(check_offload, recipe.megatron_roles, engines, devices)
        if recipe.starts_engines:
            attempt(check_engine_devices, recipe.rollout.engine, devices["rollout"])
    if recipe.placement.cluster is not None and cluster is None:
        attempt(check_cluster_answers, recipe.placement.cluster)
    if spec is not None:
        if recipe.model.path is not None:
            warnings += attempt(check_model_files, "model.path", spec, recipe.model.path) or []
        if recipe.starts_engines:
            attempt(check_engines, recipe.rollout.engine, spec)
            warnings += precision_notes(recipe.train, recipe.rollout.engine, recipe.algorithm)
            attempt(check_sampling, recipe.rollout, recipe.placement, spec, devices)
        if recipe.teacher is not None and recipe.teacher_engine is not None:
            attempt(check_teacher_engine, recipe.teacher, recipe.algorithm, recipe.samples_per_step, spec, devices)
        if recipe.asked_judge is not None:
            attempt(check_judge, recipe.asked_judge, devices)
        if here:
            warnings += attempt(check_libraries, recipe.megatron_roles, recipe.rollout.engine, devices, spec) or []
            if devices is not None:
                attempt(partial(check_imports, every=dry_run), recipe.megatron_roles, devices)
        encoded = attempt(encoded_prompts, recipe, spec, layouts)
        if encoded is not None:
            sequence = encoded.lengths.sequence
            routes = routes_of_a_token(spec.sizes) if recipe.has_routes else 0
            warnings += [*encoded.notes, *store_notes(recipe.samples, recipe.samples_per_step, sequence, routes)]
            attempt(partial(check_kept_routes, routes=bool(routes)), recipe.algorithm.kept_samples)
            driver_bytes = machine_bytes() if here and host_bytes is None else host_bytes
            attempt(check_replay, recipe.algorithm.kept_samples, sequence, driver_bytes)
    functions = recipe.functions
    if recipe.environment is not None and (of_tools := recipe.environment.tools_reward) is not None:
        functions |= {"tools": of_tools}
    warnings += attempt(check_rewards, functions, recipe.sets, encoded) or []
    if recipe.environment is not None:
        attempt(check_environment, recipe.environment)
    if encoded is not None:
        warnings += attempt(check_set_rewards, recipe.sets, encoded.sets, encoded.special_tokens) or []
    if here:
        attempt(check_run_directory, recipe.directory, recipe.model.create, spec)
        attempt(partial(check_directories, kernels=bool(devices and used_gpus(devices))))
    if recipe.metrics.wandb is not None:
        attempt(check_wandb, recipe.metrics.wandb)
    attempt(check_trackers, recipe.metrics.mlflow, recipe.metrics.trackio)
    if must_fit and devices is not None and not errors:
        if here:
            gpu_bytes = largest_gpu(devices) if gpu_bytes is None else gpu_bytes
            host_bytes = machine_bytes() if host_bytes is None else host_bytes
        if gpu_bytes is not None or host_bytes is not None:
            # At once, without SGLang: models that fit whatever the engines take, and however short responses are.
            least = partial(foresee, sequence_tokens=1, with_engines=False)
            attempt(lambda: least(recipe, devices, specs, gpu_bytes=gpu_bytes, host_bytes=host_bytes).check())
    if errors:
        raise SettingsError(_without_repeats(errors))
    return [*warnings, *resumption] if dry_run else warnings


def _without_repeats(errors: Sequence[str]) -> list[str]:
    """The errors without those of held-out sets that repeat one of the training prompts, each once."""
    return [
        error
        for error in dict.fromkeys(errors)
        if not (error.startswith("evaluation.") and error.partition(": ")[2] in errors)
    ]


def check_nobody_else(roles: Mapping[str, str], placement: PlacementConfig) -> None:
    """Check that the run's GPUs of this machine are free, unless others may use them too; a run checks them itself.

    Args:
        roles: the device map or pool of every role.
        placement: of the run.

    Raises:
        UserError: names the GPUs that others use.
    """
    devices = planned_devices(roles, placement)
    if devices is not None and not placement.shared_gpus:
        check_gpus_free(used_gpus(devices), wait_s=0.0)


def check_run_directory(directory: Path, create: CreateModel | None, spec: ModelSpec | None) -> None:
    """Check that the run's directory can be written, and has space for a model that is to be made.

    Raises:
        UserError: naming the setting.
    """
    made = 0
    if create is not None and spec is not None:
        made = spec.parameter_count() * ITEMSIZES[create.dtype]
    check_writable("run_dir", directory)
    check_room("run_dir", directory, made, "the initial model")


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
    owners: dict[Device, tuple[str, str]] = {}
    errors = []
    for name, recipe in recipes.items():
        for role, devices in (planned_devices(recipe.device_maps, recipe.placement, cluster) or {}).items():
            for device in devices:
                first, first_role = owners.setdefault(device, (name, role))
                if first != name:
                    where = f"{device.kind}:{device.index} of node {device.node}"
                    errors.append(
                        f"actor {name}: placement.{role} has {where}, as placement.{first_role} of actor {first}; "
                        "actors learn at the same time, expected devices of its own"
                    )
    return errors


def _shared_directories(recipes: Mapping[str, Recipe]) -> list[str]:
    errors = []
    for (one, first), (other, second) in itertools.combinations(recipes.items(), 2):
        if first.checkpoint_directory == second.checkpoint_directory:
            errors.append(
                f"actor {other}: checkpoint.dir={second.checkpoint_directory} is that of actor {one}, expected another"
            )
        if second.resume not in ("none", "auto") and first.resume == second.resume:
            errors.append(f"actor {other}: resume={second.resume} is that of actor {one}, expected auto or its own")
    return errors


def _too_large(recipes: Mapping[str, Recipe], cluster: Sequence[Node] | None, host_bytes: int | None) -> list[str]:
    """Lines on runs that have room each, and not all together."""
    host_bytes = machine_bytes() if host_bytes is None and cluster is None else host_bytes
    if host_bytes is None:
        return []
    gpu_gb = None if platform.gpus else 1e9  # no limit: devices are each actor's own, and have been looked at
    ledgers = {name: recipe_ledger(recipe, cluster, gpu_gb) for name, recipe in recipes.items()}
    return list(_beyond(ledgers, host_bytes))


def _beyond(ledgers: Mapping[str, MemoryLedger], host_bytes: int) -> list[str]:
    errors = []
    for node in range(max(len(ledger.hosts) for ledger in ledgers.values())):
        taken = {name: ledger.hosts[node].total for name, ledger in ledgers.items() if node < len(ledger.hosts)}
        if (total := sum(taken.values())) > host_bytes:
            sizes = ", ".join(f"{name} {amount(size, 1)}" for name, size in taken.items())
            errors.append(
                f"node {node}: the actors take {amount(total, 1)} of host memory ({sizes}), on a node of "
                f"{amount(host_bytes, 1)}"
            )
    return errors
