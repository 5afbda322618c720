"""The memory ledger: what every GPU and CPU slot of a run will hold, phase by phase, foreseen from the recipe alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine3d.checkpoint.plan import plan_checkpoint
from engine3d.errors import UserError
from engine3d.memory import Serving, serving_by_rank
from engine3d.memory.overhead import RUN_PROCESSES_BYTES
from engine3d.models import ModelSpec, load_model_spec
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Place
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.rollout.cache import PAGE_TOKENS, tokens_needed
from engine3d.rollout.config import RolloutConfig
from engine3d.startup.lazy_imports import torch
from engine3d.training.config import TrainConfig
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.cluster.hosts.checks.host_memory import machine_bytes
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import JudgeModel, RolloutRole
from hybridflow.planning.device_memory import RoleMemory, device_memory
from hybridflow.planning.gpu_check import gpu_without_one_step_experts
from hybridflow.planning.memory_ledger import GpuMemory, HostMemory, Ledger
from hybridflow.planning.model_check import role_spec
from hybridflow.planning.placement_check import planned_devices
from hybridflow.planning.prompt_check import check_prompts
from hybridflow.planning.sample_memory import cache_tokens, replay_bytes

_NOTHING = Serving(weights=0, shared=0, cache_of_a_token=0, prefix_of_a_token=0, prompt_of_a_token=0)


def foresee(
    recipe: Recipe,
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    *,
    gpu_bytes: int | None,
    sequence_tokens: int,
    host_bytes: int | None = None,
    cache_tokens: int | None = None,
    with_engines: bool = True,
    one_step_experts: bool = True,
) -> Ledger:
    """The ledger of a recipe whose layouts fit its devices.

    Args:
        recipe: the run.
        devices: of each role.
        specs: of the actor and of each model beside it.
        gpu_bytes: of each GPU; None if that is not known: it has to be with engines, whose caches go by it.
        sequence_tokens: of the longest prompt with its response.
        host_bytes: of each node's memory, if that is known.
        cache_tokens: that engines have room for at most; `rollout.engine.max_total_tokens` if None.
        with_engines: false leaves out the engines' weights and caches, checkpoints on their way to files, and what is
            only estimated: what is left is known at once, without SGLang, and certain.
        one_step_experts: whether the GPUs can make one step of what experts do, as Hopper's can.
    """
    ranks = {
        role: RoleMemory.of(recipe, role, devices[role], specs[role], sequence_tokens, one_step_experts)
        for role in specs
    }
    engines: dict[Device, Serving] = dict.fromkeys(devices.get("rollout", ()), _NOTHING)
    if with_engines and engines:
        engines = _engines(recipe.train, recipe.rollout, devices, specs["actor"])
    if cache_tokens is None:
        cache_tokens = recipe.rollout.engine.max_total_tokens
    gpus: list[GpuMemory] = []
    for device in sorted({device for role in (*specs, "rollout") for device in devices.get(role, ())}):
        size = gpu_bytes if device.kind == "cuda" else host_bytes
        found = device_memory(
            recipe.rollout.engine, device, specs["actor"], ranks, engines, size, cache_tokens, estimate=with_engines
        )
        like = next((number for number, gpu in enumerate(gpus) if replace(gpu, devices=()) == found), None)
        if like is None:
            gpus.append(replace(found, devices=(device,)))
        else:
            gpus[like] = replace(gpus[like], devices=(*gpus[like].devices, device))
    if recipe.teacher_engine is not None:
        teacher = recipe.teacher
        assert teacher is not None
        served = Served("teacher", "infer of teacher", teacher.path, recipe.teacher_engine)
        gpus += _of_served(served, devices["teacher"], gpu_bytes, host_bytes, cache_tokens, with_engines)
    if recipe.asked_judge is not None and (judge := _served_judge(recipe.asked_judge)) is not None:
        gpus += _of_served(judge, devices["judge"], gpu_bytes, host_bytes, None, with_engines)
    return Ledger(
        tuple(gpus),
        gpu_bytes,
        _hosts(
            devices,
            specs,
            ranks,
            gpus,
            replay_bytes(recipe.algorithm.kept_samples, sequence_tokens),
            with_checkpoints=with_engines and recipe.checkpoint.saves_in_background,
            estimate=with_engines,
        ),
        sequence_tokens,
        recipe.rollout.engine.max_running_requests,
        host_bytes,
    )


def check_memory(
    recipe: Recipe,
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    *,
    gpu_bytes: int | None,
    host_bytes: int | None,
) -> None:
    """Refuse what cannot fit whatever an engine takes, and however short responses are: at once, without SGLang.

    Args:
        devices: which the recipe's layouts fit.
        specs: of the actor and of each model beside it.
        gpu_bytes: of each GPU, if that is known.
        host_bytes: of each node's memory, if that is known.

    Raises:
        UserError: as `Ledger.check`.
    """
    if gpu_bytes is None and host_bytes is None:
        return
    foresee(
        recipe, devices, specs, gpu_bytes=gpu_bytes, host_bytes=host_bytes, sequence_tokens=1, with_engines=False
    ).check()


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
    others = {role: role_spec(model, role, actor) for role, model in recipe.models.items()}
    return {"actor": actor} | {role: spec for role, spec in others.items() if spec is not None}


@dataclass(frozen=True)
class Served:
    """A model beside the actor's that SGLang serves on devices of its own.

    Args:
        role: with its settings.
        phase: of the ledger.
        path: of its directory.
        config: of its engines.
    """

    role: str
    phase: str
    path: Path
    config: RolloutConfig


def _served_judge(judge: JudgeModel) -> Served | None:
    """The judge as engines like ours would serve it; None for a family whose sizes are not known here."""
    try:
        spec = load_model_spec(judge.path)
    except UserError:
        return None
    if "quantization_config" in spec.hf_config or {"quantization", "kv_cache_dtype"} & judge.engine.server_args.keys():
        return None
    config, length = judge.engine, judge.engine.context_length or spec.sizes.max_positions
    tokens = config.max_total_tokens or tokens_needed(
        requests=config.max_running_requests, sequence_tokens=length, page_tokens=max(PAGE_TOKENS.values())
    )
    names = ("tp", "ep", "mem_fraction_static", "max_running_requests", "cuda_graph")
    given = {name: getattr(config, name) for name in names}
    dtype = config.dtype if config.dtype != "auto" else _stored_dtype(spec)
    served = RolloutConfig(**given, dtype=dtype, context_length=length, max_total_tokens=tokens)
    return Served("judge", "judge", judge.path, served)


def _stored_dtype(spec: ModelSpec) -> str:
    """As SGLang takes it with dtype auto: that of the configuration, and float16 for float32."""
    found = spec.hf_config.get("dtype") or spec.hf_config.get("torch_dtype")
    return found if found in ("bfloat16", "float16") else "float16"


def _of_served(
    model: Served,
    devices: Sequence[Device],
    gpu_bytes: int | None,
    host_bytes: int | None,
    cache_tokens: int | None,
    with_engines: bool,
) -> list[GpuMemory]:
    """The devices of a model that engines serve, which have them to themselves: as of engines that generate."""
    spec, config = load_model_spec(model.path), model.config
    engines = dict.fromkeys(devices, _NOTHING)
    if with_engines:
        serving = serving_by_rank(spec, config, [_place(device) for device in devices])
        engines = dict(zip(devices, serving, strict=True))
    size = gpu_bytes if devices[0].kind == "cuda" else host_bytes
    tokens = config.max_total_tokens if config.max_total_tokens is not None else cache_tokens
    found = device_memory(config, devices[0], spec, {}, engines, size, tokens, estimate=with_engines)
    phases = tuple(
        replace(phase, name=model.phase, less=phase.less.replace("rollout.engine", f"{model.role}.engine"))
        for phase in found.phases
    )
    return [replace(found, devices=tuple(devices), phases=phases)]


def _engines(
    config: TrainConfig, rollout: RolloutRole, devices: Mapping[str, Sequence[Device]], spec: ModelSpec
) -> dict[Device, Serving]:
    """What every rank of every engine holds, by its device."""
    places = [_place(device) for device in devices["rollout"]]
    sources = []
    if rollout.weights.share and set(devices["actor"]) & set(devices["rollout"]):
        layout = config.layout.layout(len(devices["actor"]))
        transformer_engine = devices["actor"][0].kind == "cuda"
        numbered = spec.of_trainer(layout, transformer_engine=transformer_engine)
        planned = PlannedTrainer(numbered, layout, getattr(torch, config.dtype), transformer_engine=transformer_engine)
        sources = [planned.shards(rank, _place(device)) for rank, device in enumerate(devices["actor"])]
    serving = serving_by_rank(spec, rollout.engine, places, sources)
    return dict(zip(devices["rollout"], serving, strict=True))


def _hosts(
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    ranks: Mapping[str, RoleMemory],
    gpus: Sequence[GpuMemory],
    kept: int,
    *,
    with_checkpoints: bool,
    estimate: bool,
) -> tuple[HostMemory, ...]:
    nodes = 1 + max(device.node for held in devices.values() for device in held)
    found: list[dict[str, int]] = [{} for _ in range(nodes)]
    less = {}
    for role in (role for role, each in ranks.items() if each.offload):
        less[name := f"{role} between its turns"] = f"{role}.offload=false"
        for device, held in ranks[role].held.items():
            if device.kind == "cuda":
                _add(found[device.node], name, held.weights + held.optimizer - held.away)
    slots = [(device.node, gpu) for gpu in gpus if gpu.on_cpu for device in gpu.devices]
    for node, slot in slots:  # each at its worst, since they need not be at the same phase
        for name, size in {**slot.always, **slot.worst.items}.items():
            less.setdefault(name, slot.worst.less)
            _add(found[node], name, size)
    if slots and estimate:
        _add(found[0], "processes", RUN_PROCESSES_BYTES)
    if kept:  # by the driver, which is on the first node
        less[name := "replay buffer"] = "a smaller algorithm.replay_buffer_size"
        _add(found[0], name, kept)
    for role, each in ranks.items():
        if not each.trained:
            continue
        less[name := f"{role} optimizer"] = f"{each.setting}.optimizer.offload=false"
        for device, held in each.held.items():
            if held.away:
                _add(found[device.node], name, held.away)
        if with_checkpoints:
            plan = plan_checkpoint(specs[role], each.layout, precision_aware=each.config.optimizer.precision_aware)
            less[name := "checkpoints that are being written"] = "checkpoint.async_save=false"
            for rank, device in zip(plan.ranks, devices[role], strict=True):
                _add(found[device.node], name, rank.host)
    return tuple(
        HostMemory(
            items,
            less[max(items, key=items.__getitem__)] if items else "",
            page_locked=all(slot_node != node for slot_node, _ in slots) and not (kept and node == 0),
        )
        for node, items in enumerate(found)
    )


def _add(items: dict[str, int], name: str, size: int) -> None:
    items[name] = items.get(name, 0) + size


def _place(device: Device) -> Place:
    return Place(str(device.node), f"{device.kind}:{device.index}")
