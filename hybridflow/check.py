"""Everything that can be found wrong with a recipe without starting anything."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec, check_weights, load_model_spec
from engine3d.platform import platform
from engine3d.rollout.served import check_served
from hybridflow.config import Recipe
from hybridflow.contradictions import check_accepted
from hybridflow.devices import Device, DeviceMap, Node, highest_cpu_slot, pool_devices
from hybridflow.gpu_check import check_libraries, check_memory, largest_gpu, used_gpus
from hybridflow.gpu_use import check_gpus_free
from hybridflow.initial_model import initial_spec, initial_tokenizer
from hybridflow.machine import machine_bytes
from hybridflow.resume import check_checkpoint_directory, find_resumption
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.run import encode, prompt_limit
from hybridflow.settings_file import SettingsError
from hybridflow.wandb_sink import check_wandb


def check_recipe(
    recipe: Recipe,
    cluster: Sequence[Node] | None = None,
    *,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    must_fit: bool = True,
) -> list[str]:
    """Check placement, layouts, model files, prompts, checkpoints, reward functions and sinks of a recipe.

    What depends on another machine is left to the run: a cluster's devices where `placement.cluster` names one.

    Args:
        recipe: what is to run.
        cluster: nodes to run on; None for this machine.
        gpu_bytes: memory of each GPU; if None, what this machine's largest has, and unknown of other nodes.
        host_bytes: memory of each node; if None, what this machine has, and unknown of other nodes.
        must_fit: whether to refuse models that a GPU or a node has no room for, whatever the engines take.

    Returns:
        What only makes the run slower, a line each.

    Raises:
        SettingsError: with one line for every error found.
    """
    errors: list[str] = []
    warnings: list[str] = []

    def attempt(check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except UserError as error:
            errors.append(str(error))
            return None

    spec = attempt(initial_spec, recipe)
    attempt(check_checkpoints, recipe, spec)
    specs = {"actor": spec} | {role: attempt(check_model, recipe, role, spec) for role in recipe.models}
    devices = attempt(planned_devices, recipe, cluster)
    if devices is not None:
        attempt(check_layouts, recipe, devices, specs)
    if spec is not None:
        if recipe.model.path is not None:
            attempt(check_weights, spec, recipe.model.path)
        attempt(check_engines, recipe, spec)
        if cluster is None:
            warnings = attempt(check_libraries, recipe, devices, spec) or []
        attempt(check_prompts, recipe, spec)
    attempt(check_rewards, recipe)
    if recipe.metrics.wandb:
        attempt(check_wandb)
    if must_fit and devices is not None and not errors:
        if cluster is None:
            gpu_bytes = largest_gpu(devices) if gpu_bytes is None else gpu_bytes
            host_bytes = machine_bytes() if host_bytes is None else host_bytes
        attempt(partial(check_memory, gpu_bytes=gpu_bytes, host_bytes=host_bytes), recipe, devices, specs)
    if errors:
        raise SettingsError(errors)
    return warnings


def check_nobody_else(recipe: Recipe) -> None:
    """The GPUs of this machine that the recipe uses, unless others may use them too; a run looks at them itself.

    Raises:
        UserError: names the GPUs that others use.
    """
    devices = planned_devices(recipe)
    if devices is not None and not recipe.placement.shared_gpus:
        check_gpus_free(used_gpus(devices), wait_s=0.0)


def planned_devices(recipe: Recipe, cluster: Sequence[Node] | None = None) -> dict[str, tuple[Device, ...]] | None:
    """The devices of each role on these nodes, or on this machine; None where they are another cluster's.

    Nodes have as many CPU slots as the recipe names.

    Raises:
        UserError: a device map that is wrong or that the nodes do not fulfil.
    """
    roles = recipe.placement.roles(list(recipe.models))
    pools = recipe.placement.pools
    if recipe.placement.cluster is not None and cluster is None:
        for text in (*roles.values(), *pools.values()):
            if text not in pools:
                DeviceMap.parse(text)
        return None
    slots = highest_cpu_slot([*roles.values(), *pools.values()])
    nodes = cluster or [Node("this machine", gpus=platform.gpus, cpu_slots=0)]
    return pool_devices(roles, pools, [dataclasses.replace(node, cpu_slots=slots) for node in nodes])


def check_layouts(
    recipe: Recipe, devices: dict[str, tuple[Device, ...]], specs: Mapping[str, ModelSpec | None]
) -> None:
    """Every role's layout against its devices and its model.

    Args:
        specs: the model of each role, where it is known.

    Raises:
        UserError: sizes that do not divide the devices or the model, or a rollout role of another number of devices.
    """
    layouts = {}
    for role in sorted(devices.keys() - {"rollout", "reward"}):
        try:
            config = recipe.train_config(role)
            layouts[role] = config.layout.layout(len(devices[role]))
            if (spec := specs[role]) is not None:
                spec.check_layout(layouts[role])
                if role in recipe.trained_roles:
                    config.check_trained(spec.sizes, layouts[role])
        except UserError as error:
            raise UserError(f"{recipe.train_setting(role)}.layout on placement.{role}: {error}") from None
    try:
        engines = recipe.rollout.layout(len(devices["rollout"]))
    except UserError as error:
        raise UserError(f"placement.rollout: {error}") from None
    if "reward" in devices:
        check_reward_devices(len(devices["reward"]))
    if recipe.trainer.max_staleness:
        check_apart(devices, layouts)
    check_batch_sizes(recipe, engines=engines.dp, replicas=max(layout.dp for layout in layouts.values()))


def check_model(recipe: Recipe, role: str, actor: ModelSpec | None) -> ModelSpec | None:
    """The model of a role beside the actor: its files, and whether it reads the actor's tokens.

    Returns:
        The model; None if it begins with the actor's, which is unknown.

    Raises:
        UserError: naming the setting.
    """
    path = recipe.models[role].path
    try:
        spec = role_spec(recipe, role, actor)
        if path is None or spec is None:
            return spec
        check_weights(spec, path)
    except UserError as error:
        raise UserError(f"{role}.path: {error}") from None
    if actor is not None and spec.vocab_size < actor.vocab_size:
        raise UserError(
            f"{role}.path: {path} has a vocab_size of {spec.vocab_size} and the actor one of {actor.vocab_size}; "
            "expected at least as many, of the same tokenizer"
        )
    return spec


def role_spec(recipe: Recipe, role: str, actor: ModelSpec | None) -> ModelSpec | None:
    """The model of a role beside the actor; None if it begins with the actor's, which is unknown.

    Raises:
        UserError: its directory holds no model that can be one.
    """
    path, value_head = recipe.models[role].path, role != "reference"
    if path is not None:
        return load_model_spec(path, value_head=value_head)
    return dataclasses.replace(actor, value_head=value_head) if actor is not None else None


def check_apart(devices: Mapping[str, Sequence[Device]], models: Iterable[str]) -> None:
    """Engines that generate while models learn share no device with one.

    Raises:
        UserError: naming the role and the device.
    """
    for role in models:
        if shared := sorted(set(devices[role]) & set(devices["rollout"])):
            raise UserError(
                f"trainer.max_staleness=1 with placement.rollout and placement.{role} both on {shared[0].kind}:"
                f"{shared[0].index} of node {shared[0].node}, expected rollout on devices of its own"
            )


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
    if trainer.eval_prompts is not None:
        wanted.append(("trainer.eval_prompts", trainer.eval_prompts, engines, "a prompt for each rollout engine"))
    if warmup is not None:
        wanted.append(("warmup.batch_size", warmup.batch_size, replicas, "a sample for each data-parallel rank"))
    for name, value, least, why in wanted:
        if value < least:
            raise UserError(f"{name} = {value}, expected at least {least}: {why}")


def check_engines(recipe: Recipe, spec: ModelSpec) -> None:
    """What SGLang and Megatron-Core would refuse of a model that fits otherwise.

    Raises:
        UserError: naming the setting.
    """
    engine, sizes = recipe.rollout.engine, spec.sizes
    if engine.context_length is not None and engine.context_length > sizes.max_positions:
        raise UserError(
            f"rollout.engine.context_length={engine.context_length}, expected at most the model's "
            f"{sizes.max_positions} positions"
        )
    check_served(spec, engine)
    if recipe.train.megatron:  # only then, because Megatron-Core takes seconds to import
        spec.transformer_config(Layout(), getattr(torch, recipe.train.dtype), **recipe.train.megatron)


def check_prompts(recipe: Recipe, spec: ModelSpec) -> int:
    """Every prompt and supervised answer against the tokenizer, the vocabulary and the context.

    Returns:
        Tokens of the longest prompt to learn from, with the longest response to it.

    Raises:
        UserError: naming the prompt that cannot be encoded or is too long, or a vocabulary that the tokenizer exceeds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, _ = initial_tokenizer(recipe, Path(scratch))
    if len(tokenizer) > spec.vocab_size:
        raise UserError(
            f"model: the tokenizer has {len(tokenizer)} tokens and the model's vocab_size is {spec.vocab_size}; "
            "expected at least as many"
        )
    train, _, sft, _ = encode(recipe, tokenizer, prompt_limit(recipe))
    if recipe.warmup is not None and not len(sft):
        raise UserError(
            "warmup: the data has no supervised examples; expected data.arithmetic.sft_size or jsonl.sft_path"
        )
    return max(map(len, train.tokens)) + recipe.rollout.sampling.max_new_tokens


def check_checkpoints(recipe: Recipe, spec: ModelSpec | None) -> None:
    """Where checkpoints are to be written, and the one that the run is to go on after.

    Raises:
        UserError: naming the setting, and every difference between recipe and checkpoint.
    """
    check_accepted(recipe)
    check_checkpoint_directory(recipe)
    if spec is not None:
        find_resumption(recipe)


def check_rewards(recipe: Recipe) -> None:
    """Import every function of rewards and costs, each in a process of its own that ends with the check.

    Raises:
        UserError: naming the reward that cannot be imported.
    """
    for config in recipe.functions.values():
        with RewardFunctions(config) as functions:
            functions.load()
