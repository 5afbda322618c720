"""Checks that layouts, batches and engines fit the devices of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.models.precision import check_shards
from engine3d.platform import platform
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.server_arguments import check_against_platform
from engine3d.training.config import TrainConfig
from hybridflow.algorithms.preferences import PreferenceSettings
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.cluster.devices.device_map import ROLES, Device, DeviceMap, Node, highest_cpu_slot, pool_devices
from hybridflow.config.recipe import Recipe
from hybridflow.config.run import TrainerConfig, WarmupConfig
from hybridflow.planning.checks.engine import (
    check_baselines,
    check_engine_nodes,
    check_served_adapters,
    hosts_of_engine,
)
from hybridflow.planning.checks.model import check_megatron
from hybridflow.roles.config import PlacementConfig
from hybridflow.rollout.config import RolloutRole

_NODE_GPUS = 8
"""GPUs of a node, where nothing says how many it has."""


def planned_devices(
    roles: Mapping[str, str], placement: PlacementConfig, cluster: Sequence[Node] | None = None
) -> dict[str, tuple[Device, ...]] | None:
    """The devices of each role on these nodes, or on this machine; None where they are another cluster's.

    Nodes whose CPU slots are not known have as many as the device maps name.

    Args:
        roles: the device map or pool of every role.
        placement: with the pools and the cluster.
        cluster: nodes; this machine if None.

    Raises:
        UserError: a device map that is wrong or that the nodes do not fulfil.
    """
    pools = placement.pools
    if placement.cluster is not None and cluster is None:
        for text in (*roles.values(), *pools.values()):
            if text not in pools:
                DeviceMap.parse(text)
        return None
    slots = highest_cpu_slot([*roles.values(), *pools.values()])
    nodes = cluster or [Node("this machine", gpus=platform.gpus, cpu_slots=0)]
    return pool_devices(roles, pools, [dataclasses.replace(node, cpu_slots=node.cpu_slots or slots) for node in nodes])


def assumed_nodes(recipes: Sequence[Recipe]) -> list[Node] | None:
    """Nodes with the GPUs that recipes name, for a check on a machine that has none.

    Nodes of `_NODE_GPUS`, or one with fewer if that is enough; one for each role that a launcher would give nodes to.

    Returns:
        None where this machine has GPUs, the recipes need none, a device map is wrong, which the check reports, or
        they are for a cluster that is there.
    """
    if platform.gpus or any(recipe.placement.cluster is not None for recipe in recipes):
        return None
    texts = [text for recipe in recipes for text in (*recipe.device_maps.values(), *recipe.placement.pools.values())]
    pools = {name for recipe in recipes for name in recipe.placement.pools}
    try:
        maps = [DeviceMap.parse(text) for text in texts if text not in pools]
    except UserError:
        return None
    roles = [role for role in ROLES if any(device_map.role == role for device_map in maps)]
    gpus = max(
        (index + 1 for device_map in maps if device_map.kind == "cuda" for index in device_map.indices), default=0
    )
    named = max(
        (index + 1 for device_map in maps if device_map.kind == "node" for index in device_map.indices), default=0
    )
    if not gpus and not roles and named < 2:
        return None  # one node has its CPU slots
    size = min(gpus, _NODE_GPUS) if gpus and not roles and named < 2 else _NODE_GPUS
    count = max(-(-gpus // size), named, len(roles))
    given = [*roles, *[None] * (count - len(roles))]
    return [Node(f"node {index}", gpus=size, cpu_slots=0, role=role) for index, role in enumerate(given)]


def check_layouts(
    recipe: Recipe, devices: dict[str, tuple[Device, ...]], specs: Mapping[str, ModelSpec | None]
) -> dict[str, Layout]:
    """Every role's layout against its devices and its model.

    Args:
        specs: the model of each role, where it is known.

    Returns:
        The layout of each model, and of the engines, where there are any, as "rollout".

    Raises:
        UserError: sizes that do not divide the devices or the model, or a rollout role of another number of devices.
    """
    layouts = {}
    for role, settings in sorted(recipe.megatron_roles.items()):
        config, setting = settings.train, settings.setting
        try:
            layouts[role] = config.layout.layout(len(devices[role]))
            if (spec := specs[role]) is not None:
                spec.check_layout(layouts[role])
                if role == "actor" and recipe.starts_engines and recipe.rollout.engine.precision is not None:
                    check_shards(spec, layouts[role], transformer_engine=devices[role][0].kind == "cuda")
                if settings.trained:
                    config.check_trained(spec.sizes, layouts[role])
        except UserError as error:
            raise UserError(f"{setting}.layout on placement.{role}: {error}") from None
        if spec is not None:
            trained = settings.trained if role == "actor" or setting != "train" else None
            gpus = devices[role][0].kind == "cuda"
            check_megatron(config, setting, spec, layouts[role], trained=trained, gpus=gpus)
            check_copy_engine_dispatcher(config, setting, role, spec, layouts[role], devices[role])
    replicas = max(layout.dp for layout in layouts.values())
    if "rollout" not in devices:
        if not recipe.algorithm.needs_engines:
            check_given_sizes(recipe.trainer, recipe.warmup, replicas)
        return layouts
    try:
        engines = recipe.rollout.layout(len(devices["rollout"]))
    except UserError as error:
        raise UserError(f"placement.rollout: {error}") from None
    check_engine_nodes(recipe.rollout, devices["rollout"])
    precision = recipe.rollout.engine.precision
    if recipe.train.lora is not None and precision is not None and devices["rollout"][0].kind == "cuda":
        raise UserError(f"train.lora with rollout.engine.precision={precision} was not tried on GPUs; expected null")
    if recipe.train.fp8.given and precision is not None and devices["rollout"][0].kind == "cuda":
        setting = f"train.fp8.{min(recipe.train.fp8.given)}"
        raise UserError(f"{setting} with rollout.engine.precision={precision} was not tried on GPUs; expected none")
    if (adapters := recipe.served_adapters) is not None:
        check_served_adapters(recipe.rollout, adapters, specs["actor"], devices["rollout"])
    if recipe.rollout.engine.release_weights and "actor" in layouts:
        hosts = hosts_of_engine(devices["rollout"], recipe.rollout.engine.tp)
        check_released_weights(layouts["actor"], devices["actor"], devices["rollout"], hosts)
    if "reward" in devices:
        check_reward_devices(len(devices["reward"]))
    if recipe.runs_ahead:
        check_apart(recipe.trainer, recipe.rollout, ("actor", *recipe.models), devices)
    check_batch_sizes(
        recipe.trainer, recipe.rollout, recipe.algorithm, recipe.warmup, engines=engines.dp, replicas=replicas
    )
    if recipe.algorithm.greedy_baseline and recipe.reward_model is not None:
        check_baselines(recipe.trainer.prompts_per_step, layouts["reward_model"].dp)
    return layouts | {"rollout": engines}


def check_copy_engine_dispatcher(
    config: TrainConfig, setting: str, role: str, spec: ModelSpec, layout: Layout, devices: Sequence[Device]
) -> None:
    """Refuse a copy-engine dispatcher whose ranks are on several nodes.

    Raises:
        UserError: names the ranks.
    """
    if not config.has_copy_engine_dispatcher(spec.sizes, layout):
        return
    for group in _over_nodes(layout.expert_groups(), devices):
        raise UserError(
            f"{setting}.copy_engine_dispatcher=true: ranks {group[0]}-{group[-1]} of placement.{role} "
            "share experts and are on several nodes; expected one node, or false"
        )


def check_released_weights(
    layout: Layout, actor: Sequence[Device], engines: Sequence[Device], engine_hosts: int = 1
) -> None:
    """Refuse engines that release their weights next to a model of which their node has some parts alone.

    An engine that releases its weights reads them from trainers of its node, and needs every stage's. One that is on a
    single node needs every shard too.

    Args:
        layout: of the actor.
        actor: devices of its ranks.
        engines: devices of the engines.
        engine_hosts: nodes of each engine.

    Raises:
        UserError: names the node and the parts that it has.
    """
    stages: dict[int, set[int]] = {}
    shards: dict[int, set[tuple[int, int]]] = {}
    experts: dict[int, set[tuple[int, int, int]]] = {}
    for (_, at), device in zip(layout.ranks(), actor, strict=True):
        stages.setdefault(device.node, set()).add(at.pp)
        shards.setdefault(device.node, set()).add((at.pp, at.tp))
        experts.setdefault(device.node, set()).add((at.pp, at.ep, at.etp))
    for node in sorted({device.node for device in {*engines} & {*actor}}):
        of_experts = layout.pp * layout.ep * layout.etp
        if len(stages[node]) < layout.pp:
            there = ", ".join(map(str, sorted(stages[node])))
            lacking, unit = f"stages {there} of the {layout.pp} of train.layout.pp", "stage"
        elif engine_hosts == 1 and len(shards[node]) < layout.pp * layout.tp:
            lacking, unit = f"{len(shards[node])} of the {layout.pp * layout.tp} shards of the actor's layers", "shard"
        elif engine_hosts == 1 and len(experts[node]) < of_experts:
            lacking, unit = f"{len(experts[node])} of the {of_experts} shards of the actor's experts", "shard"
        else:
            continue
        raise UserError(
            f"rollout.engine.release_weights=true: node {node} has {lacking}, and its engines read from all; expected "
            f"false, or every {unit} on each node"
        )


def groups_over_nodes(
    layouts: Mapping[str, Layout], devices: Mapping[str, Sequence[Device]], nodes: Sequence[Node]
) -> list[str]:
    """Tensor- and expert-parallel groups whose ranks are on several nodes, a line each role and kind.

    Args:
        layouts: of each model, and of the engines as "rollout".
        devices: of each role, in the order of its ranks.
        nodes: of the cluster.
    """
    lines = []
    for role, layout in layouts.items():
        for name, members in _groups(role, layout, len(devices[role])):
            spread = _over_nodes(members, devices[role])
            if spread:
                where = ", ".join(dict.fromkeys(nodes[devices[role][rank].node].name for rank in spread[0]))
                lines.append(
                    f"placement.{role}: {len(spread)} of {len(members)} {name}-parallel groups are on several nodes "
                    f"(ranks {spread[0][0]}-{spread[0][-1]} on {where}): their collectives cross the network"
                )
    return lines


def _over_nodes(groups: Sequence[range], devices: Sequence[Device]) -> list[range]:
    """The groups of ranks whose devices are on several nodes."""
    return [group for group in groups if len({devices[rank].node for rank in group}) > 1]


def _groups(role: str, layout: Layout, devices: int) -> list[tuple[str, list[range]]]:
    if role == "rollout":  # an engine's experts are cut over its tensor-parallel ranks
        size = devices // layout.dp
        return [("tensor", [range(first, first + size) for first in range(0, devices, size)])]
    return [("tensor", layout.tensor_groups()), ("expert", layout.expert_groups())]


def check_apart(
    trainer: TrainerConfig, rollout: RolloutRole, models: Sequence[str], devices: Mapping[str, Sequence[Device]]
) -> None:
    """Check that engines that generate while models train share no device with one, but for those that are leased.

    Args:
        trainer, rollout: settings by which engines generate then.
        models: roles of Megatron-Core models.
        devices: of each role.

    Raises:
        UserError: naming the role and the device.
    """
    if rollout.lease:
        if not leased_engines(rollout, models, devices):
            raise UserError(
                "rollout.lease=true with placement.rollout on devices of its own alone, so that no model has a device "
                "to lease; expected false, or devices of a model in placement.rollout too"
            )
        return
    for role in models:
        if shared := sorted(set(devices[role]) & set(devices["rollout"])):
            ahead = trainer.off_policy or rollout.stream is not None
            setting = "trainer.max_staleness or rollout.stream" if ahead else "trainer.async_evaluation=true"
            otherwise = "rollout.stream with rollout.lease=true" if ahead else "trainer.async_evaluation=false"
            raise UserError(
                f"{setting} with placement.rollout and placement.{role} both on {shared[0].kind}:{shared[0].index} of "
                f"node {shared[0].node}, expected rollout on devices of its own, or {otherwise}"
            )


def leased_engines(
    rollout: RolloutRole, models: Sequence[str], devices: Mapping[str, Sequence[Device]]
) -> tuple[int, ...]:
    """Numbers of the engines that generate on devices of models while a step waits; none without `rollout.lease`.

    Args:
        rollout: settings of the engines.
        models: roles of Megatron-Core models.
        devices: of each role.
    """
    if not rollout.lease or "rollout" not in devices:
        return ()
    taken = {device for role in models for device in devices[role]}
    rollout_devices, size = devices["rollout"], rollout.engine.tp
    return tuple(
        number for number in range(len(rollout_devices) // size) if taken & set(rollout_devices[number * size :][:size])
    )


def check_reward_devices(count: int) -> None:
    """Refuse any number of devices for the reward functions but one.

    Raises:
        UserError: not one.
    """
    if count != 1:
        raise UserError(
            f"placement.reward: {count} devices, expected one; reward.functions[].workers is how many processes call a "
            "function"
        )


def check_batch_sizes(
    trainer: TrainerConfig,
    rollout: RolloutRole,
    algorithm: AlgorithmSettings,
    warmup: WarmupConfig | None,
    *,
    engines: int,
    replicas: int,
) -> None:
    """Check that every batch is enough for those who share it: engines share prompts, data-parallel replicas samples.

    Raises:
        UserError: naming the setting that leaves one of them without work.
    """
    samples = trainer.prompts_per_step * rollout.samples_per_prompt
    minimums = [
        ("trainer.prompts_per_step", trainer.prompts_per_step, engines, "a prompt for each rollout engine"),
        (
            "trainer.prompts_per_step * rollout.samples_per_prompt",
            samples,
            trainer.mini_batches * replicas,
            "a sample for each data-parallel rank of each of trainer.mini_batches",
        ),
    ]
    kept = algorithm.least_kept(rollout.samples_per_prompt)
    if kept < rollout.samples_per_prompt:
        name = f"trainer.prompts_per_step * {kept} samples that algorithm.name={algorithm.name} may leave of each"
        minimums.append((name, trainer.prompts_per_step * kept, minimums[-1][2], minimums[-1][3]))
    if isinstance(algorithm, PreferenceSettings):
        shared = trainer.mini_batches * replicas
        why = "a pair for each data-parallel rank of each of trainer.mini_batches, and a prompt makes one at most"
        minimums.append(("trainer.prompts_per_step", trainer.prompts_per_step, shared, why))
    if warmup is not None:
        minimums.append(("warmup.batch_size", warmup.batch_size, replicas, "a sample for each data-parallel rank"))
    for name, value, least, why in minimums:
        if value < least:
            raise UserError(f"{name} = {value}, expected at least {least}: {why}")


def check_given_sizes(trainer: TrainerConfig, warmup: WarmupConfig | None, replicas: int) -> None:
    """Every batch of given responses against the data-parallel replicas that share it.

    Raises:
        UserError: naming the setting that leaves one of them without work.
    """
    rank = "for each data-parallel rank"
    minimums = [
        (
            "trainer.prompts_per_step",
            trainer.prompts_per_step,
            trainer.mini_batches * replicas,
            f"a prompt {rank} of each of trainer.mini_batches",
        ),
        ("warmup.batch_size", warmup.batch_size if warmup is not None else None, replicas, f"a sample {rank}"),
    ]
    for name, value, least, why in minimums:
        if value is not None and value < least:
            raise UserError(f"{name} = {value}, expected at least {least}: {why}")


def check_engine_devices(engine: RolloutConfig, devices: Sequence[Device]) -> None:
    """Refuse settings that SGLang does not support on the devices of the engines.

    Raises:
        UserError: naming the setting.
    """
    if any(device.kind == "cpu" for device in devices):
        check_against_platform(engine.server_args, engine.attention_backend, sglang_cpu.server_arguments())
