"""The memory ledger of a recipe, on this machine or on the nodes that are named."""

from __future__ import annotations

from collections.abc import Sequence

from engine3d.errors import UserError
from engine3d.models import ModelSpec
from engine3d.platform import platform
from engine3d.startup.lazy_imports import torch
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.hosts.checks.host_memory import machine_bytes
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.recipe import Recipe
from hybridflow.planning.gpu_check import gpu_without_one_step_experts
from hybridflow.planning.memory_estimate import foresee
from hybridflow.planning.memory_ledger import Ledger
from hybridflow.planning.model_check import role_spec
from hybridflow.planning.placement_check import planned_devices
from hybridflow.planning.prompt_check import check_prompts
from hybridflow.planning.sample_memory import cache_tokens


def recipe_ledger(
    recipe: Recipe, nodes: Sequence[Node] | None, gpu_gb: float | None, host_gb: float | None = None
) -> Ledger:
    """The ledger of a recipe that has passed its checks.

    Args:
        recipe: the run.
        nodes: of the cluster; None for this machine.
        gpu_gb: memory of each GPU in GB (1e9 bytes); None for what this machine's have.
        host_gb: memory of each node in GB; None for what this machine has, and unknown of other nodes.

    Raises:
        UserError: how large the GPUs are is not known.
    """
    devices = planned_devices(recipe, nodes)
    if devices is None:
        raise UserError("--memory: the devices are those of placement.cluster; expected --nodes and --gpus-per-node")
    gpu_bytes = round(gpu_gb * 1e9) if gpu_gb is not None else None
    if gpu_bytes is None and any(device.kind == "cuda" for held in devices.values() for device in held):
        if not platform.gpus:
            raise UserError("--memory: this machine has no GPUs to go by; expected --gpu-gb, such as --gpu-gb 141")
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    specs = recipe_specs(recipe)
    lengths = check_prompts(recipe, specs["actor"])
    on_engines, most = devices.get("rollout"), None
    if on_engines is not None:
        most = cache_tokens(recipe, lengths, recipe.rollout.layout(len(on_engines)).dp, on_engines[0].kind)
    host_bytes = machine_bytes() if nodes is None else None
    if host_gb is not None:
        host_bytes = round(host_gb * 1e9)
    return foresee(
        recipe,
        devices,
        specs,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        sequence_tokens=lengths.sequence,
        cache_tokens=most,
        one_step_experts=nodes is not None or gpu_without_one_step_experts(devices) is None,
    )


def recipe_specs(recipe: Recipe) -> dict[str, ModelSpec]:
    """The actor's model, and that of each role beside it."""
    actor = initial_spec(recipe)
    others = {role: role_spec(recipe, role, actor) for role in recipe.models}
    return {"actor": actor} | {role: spec for role, spec in others.items() if spec is not None}
