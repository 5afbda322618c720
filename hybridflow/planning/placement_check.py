"""Whether layouts, batches and engines fit the devices of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.platform import platform
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.server_arguments import check_against_platform
from engine3d.training.config import TrainConfig
from hybridflow.algorithms.preferences import PreferenceSettings
from hybridflow.cluster.devices.device_map import ROLES, Device, DeviceMap, Node, highest_cpu_slot, pool_devices
from hybridflow.config.recipe import Recipe
from hybridflow.config.run import TrainerConfig, WarmupConfig
from hybridflow.planning.engine_check import check_baselines, check_engine_nodes
from hybridflow.planning.model_check import check_megatron

_NODE_GPUS = 8
"""GPUs of a node, where nothing says how many it has."""


def planned_devices(recipe: Recipe, cluster: Sequence[Node] | None = None) -> dict[str, tuple[Device, ...]] | None:
    """The devices of each role on these nodes, or on this machine; None where they are another cluster's.

    Nodes whose CPU slots are not known have as many as the recipe names.

    Raises:
        UserError: a device map that is wrong or that the nodes do not fulfil.
    """
    roles = recipe.device_maps
    pools = recipe.placement.pools
    if recipe.placement.cluster is not None and cluster is None:
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
    texts = [text for each in recipes for text in (*each.device_maps.values(), *each.placement.pools.values())]
    pools = {name for each in recipes for name in each.placement.pools}
    try:
        maps = [DeviceMap.parse(text) for text in texts if text not in pools]
    except UserError:
        return None
    roles = [role for role in ROLES if any(each.role == role for each in maps)]
    gpus = max((index + 1 for each in maps if each.kind == "cuda" for index in each.indices), default=0)
    named = max((index + 1 for each in maps if each.kind == "node" for index in each.indices), default=0)
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
    for role in sorted(("actor", *recipe.models)):
        try:
            config = recipe.train_config(role)
            layouts[role] = config.layout.layout(len(devices[role]))
            if (spec := specs[role]) is not None:
                spec.check_layout(layouts[role])
                if role in recipe.trained_roles:
                    config.check_trained(spec.sizes, layouts[role])
        except UserError as error:
            raise UserError(f"{recipe.train_setting(role)}.layout on placement.{role}: {error}") from None
        if spec is not None:
            setting, gpus = recipe.train_setting(role), devices[role][0].kind == "cuda"
            has_settings = role == "actor" or setting != "train"
            trained = role in recipe.trained_roles if has_settings else None
            check_megatron(config, setting, spec, layouts[role], trained=trained, gpus=gpus)
            check_expert_copies(config, setting, role, spec, layouts[role], devices[role])
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
    if "reward" in devices:
        check_reward_devices(len(devices["reward"]))
    if recipe.runs_ahead:
        check_apart(recipe, devices)
    check_batch_sizes(recipe, engines=engines.dp, replicas=replicas)
    if recipe.algorithm.greedy_baseline and recipe.reward_model is not None:
        check_baselines(recipe.trainer.prompts_per_step, layouts["reward_model"].dp)
    return layouts | {"rollout": engines}


def check_expert_copies(
    config: TrainConfig, setting: str, role: str, spec: ModelSpec, layout: Layout, devices: Sequence[Device]
) -> None:
    """Ranks that copy into each other's memory are on one node.

    Raises:
        UserError: names the ranks.
    """
    if not config.has_expert_copies(spec.sizes, layout):
        return
    for group in _over_nodes(layout.expert_groups(), devices):
        raise UserError(
            f"{setting}.expert_copies=true: ranks {group[0]}-{group[-1]} of placement.{role} "
            "share experts and are on several nodes; expected one node, or false"
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


def check_apart(recipe: Recipe, devices: Mapping[str, Sequence[Device]]) -> None:
    """Engines that generate while models learn share no device with one; those that are lent do.

    Raises:
        UserError: naming the role and the device.
    """
    if recipe.rollout.lend:
        if not lent_engines(recipe, devices):
            raise UserError(
                "rollout.lend=true with placement.rollout on devices of its own alone, so that no model has a device "
                "to lend; expected false, or devices of a model in placement.rollout too"
            )
        return
    for role in ("actor", *recipe.models):
        if shared := sorted(set(devices[role]) & set(devices["rollout"])):
            ahead = recipe.trainer.max_staleness > 0 or recipe.rollout.stream is not None
            setting = "trainer.max_staleness or rollout.stream" if ahead else "trainer.async_evaluation=true"
            otherwise = "rollout.stream with rollout.lend=true" if ahead else "trainer.async_evaluation=false"
            raise UserError(
                f"{setting} with placement.rollout and placement.{role} both on {shared[0].kind}:{shared[0].index} of "
                f"node {shared[0].node}, expected rollout on devices of its own, or {otherwise}"
            )


def lent_engines(recipe: Recipe, devices: Mapping[str, Sequence[Device]]) -> tuple[int, ...]:
    """Numbers of the engines that generate on devices of models while a step waits; none without `rollout.lend`."""
    if not recipe.rollout.lend or "rollout" not in devices:
        return ()
    taken = {device for role in ("actor", *recipe.models) for device in devices[role]}
    held, size = devices["rollout"], recipe.rollout.engine.tp
    return tuple(number for number in range(len(held) // size) if taken & set(held[number * size :][:size]))


def check_reward_devices(count: int) -> None:
    """How many devices call the reward functions.

    Raises:
        UserError: not one.
    """
    if count != 1:
        raise UserError(
            f"placement.reward: {count} devices, expected one; reward.functions[].workers is how many processes call a "
            "function"
        )


def check_batch_sizes(recipe: Recipe, *, engines: int, replicas: int) -> None:
    """Every batch against those who share it: prompts among engines, samples among data-parallel replicas.

    Raises:
        UserError: naming the setting that leaves one of them without work.
    """
    trainer, warmup = recipe.trainer, recipe.warmup
    samples = trainer.prompts_per_step * recipe.rollout.samples_per_prompt
    wanted = [
        ("trainer.prompts_per_step", trainer.prompts_per_step, engines, "a prompt for each rollout engine"),
        (
            "trainer.prompts_per_step * rollout.samples_per_prompt",
            samples,
            trainer.mini_batches * replicas,
            "a sample for each data-parallel rank of each of trainer.mini_batches",
        ),
    ]
    kept = recipe.algorithm.least_kept(recipe.rollout.samples_per_prompt)
    if kept < recipe.rollout.samples_per_prompt:
        name = (
            f"trainer.prompts_per_step * {kept} samples that algorithm.name={recipe.algorithm.name} may leave of each"
        )
        wanted.append((name, trainer.prompts_per_step * kept, wanted[-1][2], wanted[-1][3]))
    if isinstance(recipe.algorithm, PreferenceSettings):
        shared = trainer.mini_batches * replicas
        why = "a pair for each data-parallel rank of each of trainer.mini_batches, and a prompt makes one at most"
        wanted.append(("trainer.prompts_per_step", trainer.prompts_per_step, shared, why))
    if warmup is not None:
        wanted.append(("warmup.batch_size", warmup.batch_size, replicas, "a sample for each data-parallel rank"))
    for name, value, least, why in wanted:
        if value < least:
            raise UserError(f"{name} = {value}, expected at least {least}: {why}")


def check_given_sizes(trainer: TrainerConfig, warmup: WarmupConfig | None, replicas: int) -> None:
    """Every batch of given responses against the data-parallel replicas that share it.

    Raises:
        UserError: naming the setting that leaves one of them without work.
    """
    rank = "for each data-parallel rank"
    wanted = [
        (
            "trainer.prompts_per_step",
            trainer.prompts_per_step,
            trainer.mini_batches * replicas,
            f"a prompt {rank} of each of trainer.mini_batches",
        ),
        ("warmup.batch_size", warmup.batch_size if warmup is not None else None, replicas, f"a sample {rank}"),
    ]
    for name, value, least, why in wanted:
        if value is not None and value < least:
            raise UserError(f"{name} = {value}, expected at least {least}: {why}")


def check_engine_devices(engine: RolloutConfig, devices: Sequence[Device]) -> None:
    """What SGLang cannot run with on the devices of the engines.

    Raises:
        UserError: naming the setting.
    """
    if any(device.kind == "cpu" for device in devices):
        check_against_platform(engine.server_args, engine.attention_backend, sglang_cpu.server_arguments())
