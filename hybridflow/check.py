"""Everything that can be found wrong with a recipe without starting anything."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec, check_finite_weights, check_weights, load_model_spec
from engine3d.platform import platform, sglang_cpu
from engine3d.rollout.cache import RESERVED_TOKENS
from engine3d.rollout.served import check_served
from engine3d.rollout.server_arguments import check_against_platform
from engine3d.training.megatron_options import check_effect, check_options
from engine3d.training.megatron_settings import megatron_settings
from hybridflow.cache_size import Lengths
from hybridflow.cluster_address import check_cluster_answers
from hybridflow.config import Recipe, ScoringModel
from hybridflow.contradictions import check_accepted
from hybridflow.data.tasks import Example, field_names
from hybridflow.devices import Device, DeviceMap, Node, highest_cpu_slot, pool_devices
from hybridflow.engine_check import (
    check_baselines,
    check_engine_nodes,
    check_evaluation,
    check_same_tokens,
    check_sampling,
)
from hybridflow.gpu_check import check_libraries, check_memory, largest_gpu, used_gpus
from hybridflow.gpu_use import check_gpus_free
from hybridflow.initial_model import initial_spec, initial_tokenizer
from hybridflow.machine import check_authentication, machine_bytes
from hybridflow.offload import check_offload
from hybridflow.recipe_paths import explained
from hybridflow.resume import check_checkpoint_directory, find_resumption
from hybridflow.rewards.builtin import check_text_answers
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.run import encode, overlong_notes, prompt_limit
from hybridflow.settings_file import SettingsError
from hybridflow.surroundings import check_directories, check_room, check_writable
from hybridflow.wandb_sink import check_wandb

_FINITE_LIMIT_S = 5.0
"""For looking through the weights of one model: some 5 GB."""


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
        What only makes the run slower, and prompts that are too long for it, a line each.

    Raises:
        SettingsError: with one line for every error found.
    """
    errors: list[str] = []
    warnings: list[str] = []

    def attempt(check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except UserError as error:
            errors.append(explained(str(error), recipe))
            return None

    attempt(check_authentication)
    encoded: EncodedPrompts | None = None
    spec = attempt(initial_spec, recipe)
    attempt(check_checkpoints, recipe, spec)
    specs = {"actor": spec} | {role: attempt(check_model, recipe, role, spec) for role in recipe.models}
    devices = attempt(planned_devices, recipe, cluster)
    layouts = attempt(check_layouts, recipe, devices, specs) if devices is not None else None
    if devices is not None:
        attempt(check_offload, recipe, devices)
        attempt(check_engine_devices, recipe, devices)
    if recipe.placement.cluster is not None and cluster is None:
        attempt(check_cluster_answers, recipe.placement.cluster)
    if spec is not None:
        if recipe.model.path is not None:
            warnings += attempt(check_model_files, "model.path", spec, recipe.model.path) or []
        attempt(check_engines, recipe, spec)
        attempt(check_sampling, recipe, spec, devices)
        if cluster is None:
            warnings += attempt(check_libraries, recipe, devices, spec) or []
        encoded = attempt(encoded_prompts, recipe, spec, layouts)
        if encoded is not None:
            warnings += encoded.notes
    attempt(check_rewards, recipe, encoded)
    if cluster is None:
        attempt(check_run_directory, recipe, spec)
        attempt(partial(check_directories, kernels=bool(devices and used_gpus(devices))))
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
) -> dict[str, Layout]:
    """Every role's layout against its devices and its model.

    Args:
        specs: the model of each role, where it is known.

    Returns:
        The layout of each model, and of the engines as "rollout".

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
        if spec is not None:
            check_megatron(recipe, role, spec, layouts[role], gpus=devices[role][0].kind == "cuda")
    try:
        engines = recipe.rollout.layout(len(devices["rollout"]))
    except UserError as error:
        raise UserError(f"placement.rollout: {error}") from None
    check_engine_nodes(recipe, devices["rollout"])
    if "reward" in devices:
        check_reward_devices(len(devices["reward"]))
    if recipe.trainer.max_staleness:
        check_apart(devices, layouts)
    check_batch_sizes(recipe, engines=engines.dp, replicas=max(layout.dp for layout in layouts.values()))
    check_baselines(recipe, layouts)
    return layouts | {"rollout": engines}


def check_megatron(recipe: Recipe, role: str, spec: ModelSpec, layout: Layout, *, gpus: bool) -> None:
    """A role's `train.megatron` against its model, its layout, its other settings and its devices.

    Raises:
        UserError: naming the option.
    """
    config, setting = recipe.train_config(role), recipe.train_setting(role)
    try:
        if role == "actor" or setting != "train":
            check_effect(config, spec, trained=role in recipe.trained_roles)
        check_options(config, spec, layout, transformer_engine=gpus)
        if config.megatron and gpus == platform.has_transformer_engine:  # Megatron-Core takes seconds to import
            settings = megatron_settings(config, spec, layout)
            spec.transformer_config(layout, getattr(torch, config.dtype), **settings)
    except UserError as error:
        raise UserError(f"{setting}.{error}") from None


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
        check_model_files(f"{role}.path", spec, path, needs_head=isinstance(recipe.models[role], ScoringModel))
    except UserError as error:
        raise UserError(f"{role}.path: {error}") from None
    if actor is not None and spec.vocab_size < actor.vocab_size:
        raise UserError(
            f"{role}.path: {path} has a vocab_size of {spec.vocab_size} and the actor one of {actor.vocab_size}; "
            "expected at least as many, of the same tokenizer"
        )
    return spec


def check_model_files(setting: str, spec: ModelSpec, directory: Path, *, needs_head: bool = False) -> list[str]:
    """The weights of a model: that all are there, and finite, as far as can be read in a few seconds.

    Args:
        needs_head: refuse files without a value head, for a model whose head nobody trains.

    Returns:
        What was not looked at, in a line; the ranks look at all that they load.

    Raises:
        UserError: names the tensor.
    """
    check_weights(spec, directory, needs_head=needs_head)
    looked_at, whole = check_finite_weights(spec, directory, limit_s=_FINITE_LIMIT_S)
    if looked_at == whole:
        return []
    return [
        f"{setting}: {looked_at / 1e9:.1f} of {whole / 1e9:.1f} GB of weights were looked at for nan and infinity in "
        f"{_FINITE_LIMIT_S:g} s; the ranks look at all that they load"
    ]


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


def check_engine_devices(recipe: Recipe, devices: Mapping[str, Sequence[Device]]) -> None:
    """What SGLang cannot run with on the devices of the engines.

    Raises:
        UserError: naming the setting.
    """
    engine = recipe.rollout.engine
    if any(device.kind == "cpu" for device in devices["rollout"]):
        check_against_platform(engine.server_args, engine.attention_backend, sglang_cpu.server_arguments())


@dataclass(frozen=True)
class EncodedPrompts:
    """What was found out about the prompts of a recipe.

    Args:
        lengths: how long prompts and responses are.
        examples: to learn from, and to evaluate with.
        notes: which prompts are cut or dropped, in lines.
    """

    lengths: Lengths
    examples: list[Example]
    notes: list[str]


def check_prompts(recipe: Recipe, spec: ModelSpec) -> Lengths:
    """As `encoded_prompts`; how long prompts and responses are."""
    return encoded_prompts(recipe, spec).lengths


def encoded_prompts(recipe: Recipe, spec: ModelSpec, layouts: Mapping[str, Layout] | None = None) -> EncodedPrompts:
    """Every prompt and supervised answer against the tokenizer, the vocabulary and the context.

    Args:
        layouts: of each model, and of the engines as "rollout", where they are known.

    Raises:
        UserError: naming the prompt that cannot be encoded or is too long, a vocabulary that the tokenizer exceeds, a
            model of other tokens, too few prompts to evaluate with, or a KV cache without room for one sequence.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, files = initial_tokenizer(recipe, Path(scratch))
        for role, model in recipe.models.items():
            if model.path is not None:
                check_same_tokens(role, model.path, files)
    if len(tokenizer) > spec.vocab_size:
        raise UserError(
            f"model: the tokenizer has {len(tokenizer)} tokens and the model's vocab_size is {spec.vocab_size}; "
            "expected at least as many"
        )
    limit = prompt_limit(recipe)
    train, evaluation, sft, answers = encode(recipe, tokenizer, limit)
    of = {"prompt": train.tokens, "evaluation prompt": evaluation.tokens, "supervised prompt": sft.tokens}
    for what, encoded in {**of, "supervised answer": answers}.items():
        check_token_ids(what, encoded, spec.vocab_size)
    check_token_ids(
        "end-of-sequence and pad token", [[tokenizer.eos_token_id, tokenizer.pad_token_id]], spec.vocab_size
    )
    recipe.for_prompts(len(train))
    if recipe.warmup is not None and not len(sft):
        raise UserError(
            "warmup: the data has no supervised examples; expected data.arithmetic.sft_size or jsonl.sft_path"
        )
    if layouts is not None:
        check_evaluation(recipe, len(evaluation), layouts)
    lengths = Lengths.of(recipe, train.tokens, evaluation.tokens)
    given = recipe.rollout.engine.max_total_tokens
    longest = max(lengths.prompt, lengths.held_out_prompt) + lengths.response + RESERVED_TOKENS
    if given is not None and given < longest:
        raise UserError(
            f"rollout.engine.max_total_tokens={given}, expected at least {longest}: the longest prompt, the longest "
            f"response and the {RESERVED_TOKENS} that SGLang keeps; or null for as many as the requests need"
        )
    phases = {"training": train, "held-out": evaluation, "supervised": sft}
    return EncodedPrompts(lengths, [*train.examples, *evaluation.examples], overlong_notes(recipe, phases, limit))


def check_token_ids(what: str, encoded: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Token ids against the model's vocabulary: a tokenizer may have fewer tokens than its largest id.

    Raises:
        UserError: names the text and the id.
    """
    for index, tokens in enumerate(encoded):
        if (largest := max(tokens, default=0)) >= vocab_size:
            raise UserError(
                f"model: {what} {index} has token id {largest} and the model's vocab_size is {vocab_size}; expected a "
                "tokenizer of this model"
            )


def check_run_directory(recipe: Recipe, spec: ModelSpec | None) -> None:
    """Whether the run's files can be made, and hold the model where that is to be made too.

    Raises:
        UserError: naming the setting.
    """
    made = 0
    if recipe.model.create is not None and spec is not None:
        made = spec.parameter_count() * getattr(torch, recipe.model.create.dtype).itemsize
    check_writable("run_dir", recipe.directory)
    check_room("run_dir", recipe.directory, made, "the initial model")


def check_checkpoints(recipe: Recipe, spec: ModelSpec | None) -> None:
    """Where checkpoints are to be written, and the one that the run is to go on after.

    Raises:
        UserError: naming the setting, and every difference between recipe and checkpoint.
    """
    check_accepted(recipe)
    check_checkpoint_directory(recipe)
    if spec is not None:
        find_resumption(recipe)


def check_rewards(recipe: Recipe, encoded: EncodedPrompts | None) -> None:
    """Import every function of rewards and costs, each in a process of its own that ends with the check.

    Args:
        recipe: with the functions.
        encoded: the prompts, whose fields functions may ask for; None where they are not known.

    Raises:
        UserError: naming the reward that cannot be imported, that asks for what the data have not, or that cannot
            compare with their answers.
    """
    fields = field_names(encoded.examples) if encoded is not None else None
    for config in recipe.functions.values():
        with RewardFunctions(config, fields) as functions:
            functions.load()
        if encoded is not None and any(function.path == "arithmetic" for function in config.functions):
            check_text_answers([example.answer for example in encoded.examples])
