"""Everything that can be found wrong with a recipe without starting anything."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from engine3d.models import ModelSpec, check_weights
from engine3d.platform import platform
from hybridflow.config import Recipe
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS
from hybridflow.data.tokenizer import load_tokenizer, make_character_tokenizer
from hybridflow.devices import Device, DeviceMap, Node, highest_cpu_slot, pool_devices
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.run import encode, initial_spec, prompt_limit
from hybridflow.settings_file import SettingsError


def check_recipe(recipe: Recipe) -> None:
    """Check placement, layouts, model files, prompts and reward functions of a recipe.

    What depends on another machine is left to the run: a cluster's devices where `placement.cluster` names one.

    Raises:
        SettingsError: with one line for every error found.
    """
    errors: list[str] = []

    def attempt(check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except UserError as error:
            errors.append(str(error))
            return None

    spec = attempt(initial_spec, recipe)
    devices = attempt(local_devices, recipe)
    if devices is not None:
        attempt(check_layouts, recipe, devices, spec)
    if spec is not None:
        if recipe.model.path is not None:
            attempt(check_weights, spec, recipe.model.path)
        attempt(check_prompts, recipe, spec)
    attempt(check_rewards, recipe)
    if errors:
        raise SettingsError(errors)


def local_devices(recipe: Recipe) -> dict[str, tuple[Device, ...]] | None:
    """The devices of each role on this machine; None where they are a cluster's.

    Raises:
        UserError: a device map that is wrong or that this machine does not fulfil.
    """
    roles = recipe.placement.roles(with_reference=recipe.algorithm.needs_reference)
    pools = recipe.placement.pools
    if recipe.placement.cluster is not None:
        for text in (*roles.values(), *pools.values()):
            if text not in pools:
                DeviceMap.parse(text)
        return None
    slots = highest_cpu_slot([*roles.values(), *pools.values()])
    return pool_devices(roles, pools, [Node("this machine", gpus=platform.gpus, cpu_slots=slots)])


def check_layouts(recipe: Recipe, devices: dict[str, tuple[Device, ...]], spec: ModelSpec | None) -> None:
    """Every role's layout against its devices and its model.

    Raises:
        UserError: sizes that do not divide the devices or the model, or a rollout role of another number of devices.
    """
    for role in devices.keys() - {"rollout"}:
        try:
            layout = recipe.train.layout.layout(len(devices[role]))
            if spec is not None:
                spec.check_layout(layout)
        except UserError as error:
            raise UserError(f"train.layout on placement.{role}: {error}") from None
    try:
        engines = recipe.rollout.layout(len(devices["rollout"]))
    except UserError as error:
        raise UserError(f"placement.rollout: {error}") from None
    if recipe.trainer.prompts_per_step < engines.dp:
        raise UserError(
            f"trainer.prompts_per_step={recipe.trainer.prompts_per_step} for {engines.dp} rollout engines, "
            "expected at least one prompt each"
        )


def check_prompts(recipe: Recipe, spec: ModelSpec) -> None:
    """Every prompt and supervised answer against the tokenizer, the vocabulary and the context.

    Raises:
        UserError: naming the prompt that cannot be encoded or is too long, or a vocabulary that the tokenizer exceeds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = _tokenizer(recipe, Path(scratch))
    if len(tokenizer) > spec.vocab_size:
        raise UserError(
            f"model: the tokenizer has {len(tokenizer)} tokens and the model's vocab_size is {spec.vocab_size}; "
            "expected at least as many"
        )
    encode(recipe, tokenizer, prompt_limit(recipe))


def check_rewards(recipe: Recipe) -> None:
    """Import every reward function, each in a process of its own that ends with the check.

    Raises:
        UserError: naming the reward that cannot be imported.
    """
    with RewardFunctions(recipe.reward) as functions:
        functions.load()


def _tokenizer(recipe: Recipe, scratch: Path) -> PreTrainedTokenizerBase:
    if recipe.model.path is not None:
        return load_tokenizer(recipe.model.path)
    return make_character_tokenizer(ARITHMETIC_CHARACTERS, scratch)
