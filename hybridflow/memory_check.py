"""The memory ledger of a recipe, on this machine's GPUs or on those that are named."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from engine3d.errors import UserError
from engine3d.models import ModelSpec, load_model_spec
from engine3d.platform import platform
from hybridflow.config import Recipe
from hybridflow.devices import Node, highest_cpu_slot, pool_devices
from hybridflow.initial_model import initial_spec, initial_tokenizer
from hybridflow.memory import Ledger, foresee
from hybridflow.run import encode, prompt_limit


def recipe_ledger(recipe: Recipe, nodes: Sequence[Node] | None, gpu_gb: float | None) -> Ledger:
    """The ledger of a recipe that has passed its checks.

    Args:
        recipe: the run.
        nodes: of the cluster; None for this machine.
        gpu_gb: memory of each GPU in GB (1e9 bytes); None for what this machine's have.

    Raises:
        UserError: no GPU is used, or how large they are is not known.
    """
    wanted, pools = recipe.placement.roles(list(recipe.models)), recipe.placement.pools
    slots = highest_cpu_slot([*wanted.values(), *pools.values()])
    here = [Node("this machine", gpus=platform.gpus, cpu_slots=slots)]
    cluster = [dataclasses.replace(node, cpu_slots=slots) for node in nodes] if nodes is not None else here
    devices = pool_devices(wanted, pools, cluster)
    if not any(device.kind == "cuda" for held in devices.values() for device in held):
        raise UserError("--memory: no role of this recipe is on a GPU")
    if gpu_gb is None and not platform.gpus:
        raise UserError("--memory: this machine has no GPUs to go by; expected --gpu-gb, such as --gpu-gb 141")
    gpu_bytes = round(gpu_gb * 1e9) if gpu_gb is not None else torch.cuda.get_device_properties(0).total_memory
    return foresee(recipe, devices, _specs(recipe), gpu_bytes=gpu_bytes, sequence_tokens=_longest_sequence(recipe))


def _specs(recipe: Recipe) -> dict[str, ModelSpec]:
    """The actor's model, and that of each role beside it."""
    actor = initial_spec(recipe)
    specs = {"actor": actor}
    for role, model in recipe.models.items():
        value_head = role != "reference"
        if model.path is not None:
            specs[role] = load_model_spec(model.path, value_head=value_head)
        else:
            specs[role] = dataclasses.replace(actor, value_head=value_head)
    return specs


def _longest_sequence(recipe: Recipe) -> int:
    """Tokens of the longest prompt to learn from, with the longest response to it."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, _ = initial_tokenizer(recipe, Path(scratch))
    train, _, _, _ = encode(recipe, tokenizer, prompt_limit(recipe))
    return max(map(len, train.tokens)) + recipe.rollout.sampling.max_new_tokens
