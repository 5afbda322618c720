"""The memory ledger: what every GPU and CPU slot of a run will hold, phase by phase, foreseen from the recipe alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine3d.checkpoint.writing.plan import plan_checkpoint
from engine3d.errors import UserError
from engine3d.memory import ServingBytes, serving_by_rank
from engine3d.memory.overhead import CALL_PARSER_BYTES, RUN_PROCESSES_BYTES
from engine3d.models import ModelSpec, load_model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.rollout.cache import PAGE_TOKENS, tokens_needed
from engine3d.rollout.config import RolloutConfig
from engine3d.startup.lazy_imports import torch
from engine3d.training.config import LayoutConfig, TrainConfig
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.cluster.hosts.checks.facts import machine_bytes
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.recipe import Recipe
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.planning.checks.gpu import gpu_without_fused_experts
from hybridflow.planning.checks.model import role_spec
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.planning.checks.prompt import encoded_prompts
from hybridflow.planning.memory.device import RoleMemory, device_memory
from hybridflow.planning.memory.ledger import GpuMemory, HostMemory, MemoryLedger
from hybridflow.planning.memory.samples import cache_tokens, replay_bytes, route_bytes_by_node
from hybridflow.roles.config import JudgeModel
from hybridflow.rollout.config import RolloutRole

_NOTHING = ServingBytes(weights=0, shared=0, cache_of_a_token=0, prefix_of_a_token=0, prompt_of_a_token=0)


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
    fused_experts: bool = True,
) -> MemoryLedger:
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
        fused_experts: true if the GPUs have the kernels of fused experts, as Hopper's have.
    """
    ranks = {
        role: RoleMemory.of(
            settings,
            devices[role],
            specs[role],
            samples=recipe.algorithm.most_trained(recipe.samples_per_step),
            mini_batches=recipe.trainer.mini_batches,
            sequence_tokens=sequence_tokens,
            fused_experts=fused_experts,
            engine_precision=recipe.rollout.engine.precision,
            serves=role == "actor" and recipe.starts_engines,
        )
        for role, settings in recipe.megatron_roles.items()
        if role in specs
    }
    engines: dict[Device, ServingBytes] = dict.fromkeys(devices.get("rollout", ()), _NOTHING)
    if with_engines and engines:
        engine = recipe.rollout.engine.model_copy(update={"routes": recipe.has_routes})
        rollout = recipe.rollout.model_copy(update={"engine": engine})
        train = recipe.train
        engines = _engines(train.layout, train.dtype, rollout, devices, specs["actor"], recipe.served_adapters)
    if cache_tokens is None:
        cache_tokens = recipe.rollout.engine.max_total_tokens
    gpus: list[GpuMemory] = []
    routes: dict[Device, int] = {}
    for device in sorted({device for role in (*specs, "rollout") for device in devices.get(role, ())}):
        size = gpu_bytes if device.kind == "cuda" else host_bytes
        memory = device_memory(
            recipe.rollout.engine, device, specs["actor"], ranks, engines, size, cache_tokens, estimate=with_engines
        )
        if device in engines and engines[device].routes_of_a_token:
            tokens = memory.cache_tokens // recipe.rollout.engine.attention_dp
            routes[device] = tokens * engines[device].routes_of_a_token
        memory = replace(memory, devices=(device,))
        like = next((number for number, gpu in enumerate(gpus) if gpu.is_like(memory)), None)
        if like is None:
            gpus.append(memory)
        else:
            gpus[like] = gpus[like].joined(memory)
    if recipe.teacher_engine is not None:
        teacher = recipe.teacher
        assert teacher is not None
        served = Served("teacher", "infer of teacher", teacher.path, recipe.teacher_engine)
        gpus += _of_served(served, devices["teacher"], gpu_bytes, host_bytes, cache_tokens, with_engines)
    if recipe.asked_judge is not None and (judge := _served_judge(recipe.asked_judge)) is not None:
        gpus += _of_served(judge, devices["judge"], gpu_bytes, host_bytes, None, with_engines)
    return MemoryLedger(
        tuple(gpus),
        gpu_bytes,
        _hosts(
            devices,
            specs,
            ranks,
            gpus,
            replay_bytes(recipe.algorithm.kept_samples, sequence_tokens),
            routes,
            _routes_of_samples(
                recipe.train,
                ranks.get("actor"),
                specs,
                devices,
                recipe.samples_per_step,
                sequence_tokens,
                generated=recipe.has_routes,
            ),
            _parsing_nodes(recipe.environment, devices),
            with_checkpoints=with_engines and recipe.checkpoint.saves_in_background,
            estimate=with_engines,
        ),
        sequence_tokens,
        recipe.rollout.engine.max_running_requests,
        host_bytes,
    )


def recipe_ledger(
    recipe: Recipe, nodes: Sequence[Node] | None, gpu_gb: float | None, host_gb: float | None = None
) -> MemoryLedger:
    """The ledger of a recipe that has passed its checks.

    Args:
        recipe: the run.
        nodes: of the cluster; None for this machine.
        gpu_gb: memory of each GPU in GB (1e9 bytes); None for what this machine's have.
        host_gb: memory of each node in GB; None for what this machine has, and unknown of other nodes.

    Raises:
        UserError: how large the GPUs are is not known.
    """
    devices = planned_devices(recipe.device_maps, recipe.placement, nodes)
    if devices is None:
        raise UserError("--memory: the devices are those of placement.cluster; expected --nodes and --gpus-per-node")
    gpu_bytes = round(gpu_gb * 1e9) if gpu_gb is not None else None
    if gpu_bytes is None and any(device.kind == "cuda" for role_devices in devices.values() for device in role_devices):
        if not platform.gpus:
            raise UserError("--memory: this machine has no GPUs to go by; expected --gpu-gb, such as --gpu-gb 141")
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    specs = recipe_specs(recipe)
    lengths = encoded_prompts(recipe, specs["actor"]).lengths
    on_engines, most = devices.get("rollout"), None
    if on_engines is not None:
        engines = recipe.rollout.layout(len(on_engines)).dp
        most = cache_tokens(recipe.rollout, recipe.groups_in_flight, lengths, engines, on_engines[0].kind)
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
        fused_experts=nodes is not None or gpu_without_fused_experts(devices) is None,
    )


def recipe_specs(recipe: Recipe) -> dict[str, ModelSpec]:
    """Read the specification of the actor's model, and of that of each role next to it."""
    actor = initial_spec(recipe.model)
    specs = {"actor": actor} | {role: role_spec(model, role, actor) for role, model in recipe.models.items()}
    settings = {role: recipe.train_config(role) for role in specs}
    return {
        role: settings[role].with_mtp(settings[role].fp8.applied(spec))
        for role, spec in specs.items()
        if spec is not None
    }


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
    """Return the dtype that SGLang takes with dtype auto: that of the configuration, and float16 for float32."""
    dtype = spec.hf_config.get("dtype") or spec.hf_config.get("torch_dtype")
    return dtype if dtype in ("bfloat16", "float16") else "float16"


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
        serving = serving_by_rank(spec, config, [_location(device) for device in devices])
        engines = dict(zip(devices, serving, strict=True))
    size = gpu_bytes if devices[0].kind == "cuda" else host_bytes
    tokens = config.max_total_tokens if config.max_total_tokens is not None else cache_tokens
    memory = device_memory(config, devices[0], spec, {}, engines, size, tokens, estimate=with_engines)
    phases = tuple(
        replace(phase, name=model.phase, less=phase.less.replace("rollout.engine", f"{model.role}.engine"))
        for phase in memory.phases
    )
    return [replace(memory, devices=tuple(devices), phases=phases)]


def _engines(
    actor_layout: LayoutConfig,
    actor_dtype: str,
    rollout: RolloutRole,
    devices: Mapping[str, Sequence[Device]],
    spec: ModelSpec,
    adapters: LoraConfig | None,
) -> dict[Device, ServingBytes]:
    """Return the memory of every rank of every engine, by its device."""
    locations = [_location(device) for device in devices["rollout"]]
    sources = []
    if rollout.weights.share and set(devices["actor"]) & set(devices["rollout"]):
        layout = actor_layout.layout(len(devices["actor"]))
        transformer_engine = devices["actor"][0].kind == "cuda"
        numbered = spec.of_trainer(layout, transformer_engine=transformer_engine)
        planned = PlannedTrainer(numbered, layout, getattr(torch, actor_dtype), transformer_engine=transformer_engine)
        sources = [planned.shards(rank, _location(device)) for rank, device in enumerate(devices["actor"])]
    serving = serving_by_rank(spec, rollout.engine, locations, sources, adapters)
    return dict(zip(devices["rollout"], serving, strict=True))


def _parsing_nodes(environment: EnvironmentConfig | None, devices: Mapping[str, Sequence[Device]]) -> list[int]:
    """The node of each rank that reads calls of tools; none in a replay, which starts neither these nor engines."""
    if environment is None or (environment.tools is None and environment.agent is None):
        return []
    return [device.node for device in devices.get("reward") or devices.get("rollout", ())[:1]]


def _routes_of_samples(
    train: TrainConfig,
    actor: RoleMemory | None,
    specs: Mapping[str, ModelSpec],
    devices: Mapping[str, Sequence[Device]],
    samples: int,
    sequence_tokens: int,
    *,
    generated: bool,
) -> dict[int, int]:
    if actor is None or not (generated or train.routing_replay != "none"):
        return {}
    return route_bytes_by_node(
        specs["actor"],
        actor.layout,
        devices["actor"],
        devices.get("rollout", devices["actor"][:1]) if generated else (),  # a replay has stored ones
        step_tokens=samples * sequence_tokens,
        micro_batch_tokens=max(train.micro_batch_tokens, sequence_tokens),
    )


def _hosts(
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    ranks: Mapping[str, RoleMemory],
    gpus: Sequence[GpuMemory],
    kept: int,
    routes: Mapping[Device, int],
    routes_of_samples: Mapping[int, int],
    parsing: Sequence[int],
    *,
    with_checkpoints: bool,
    estimate: bool,
) -> tuple[HostMemory, ...]:
    nodes = 1 + max(device.node for role_devices in devices.values() for device in role_devices)
    taken: list[dict[str, int]] = [{} for _ in range(nodes)]
    less = {}
    for role in (role for role, memory in ranks.items() if memory.role.offload):
        less[name := f"{role} between its turns"] = f"{role}.offload=false"
        for device, resident in ranks[role].resident.items():
            if device.kind == "cuda":
                _add(taken[device.node], name, resident.weights + resident.optimizer - resident.offloaded)
    slots = [(device.node, gpu) for gpu in gpus if gpu.on_cpu for device in gpu.devices]
    for node, slot in slots:  # each at its worst, since they need not be at the same phase
        for name, size in {**slot.always, **slot.worst.items}.items():
            less.setdefault(name, slot.worst.less)
            _add(taken[node], name, size)
    if slots and estimate:
        _add(taken[0], "processes", RUN_PROCESSES_BYTES)
        less[name := "parsers of tool calls"] = "fewer ranks in placement.reward"
        for node in parsing:
            _add(taken[node], name, CALL_PARSER_BYTES)
    less["routes"] = "a smaller rollout.engine.max_total_tokens, or train.routing_replay=none"
    for device, size in routes.items():
        _add(taken[device.node], "routes", size)
    less[name := "routes of samples"] = "fewer trainer.prompts_per_step, or train.routing_replay=none"
    for node, size in routes_of_samples.items():
        _add(taken[node], name, size)
    if kept:  # by the driver, which is on the first node
        less[name := "replay buffer"] = "a smaller algorithm.replay_buffer_size"
        _add(taken[0], name, kept)
    for role, memory in ranks.items():
        if not memory.role.trained:
            continue
        less[name := f"{role} optimizer"] = f"{memory.role.setting}.optimizer.offload=false"
        for device, resident in memory.resident.items():
            if resident.offloaded:
                _add(taken[device.node], name, resident.offloaded)
        if with_checkpoints:
            lora = memory.role.train.lora
            plan = plan_checkpoint(
                AdapterSpec.of(specs[role], lora) if lora is not None else specs[role],
                memory.layout,
                precision_aware=memory.role.train.optimizer.precision_aware,
                transformer_engine=devices[role][0].kind == "cuda",
            )
            less[name := "checkpoints that are being written"] = "checkpoint.async_save=false"
            for rank, device in zip(plan.ranks, devices[role], strict=True):
                _add(taken[device.node], name, rank.host)
    return tuple(
        HostMemory(
            items,
            less[max(items, key=items.__getitem__)] if items else "",
            page_locked=not items.keys() & {"routes", "routes of samples"}
            and all(slot_node != node for slot_node, _ in slots)
            and not (kept and node == 0),
        )
        for node, items in enumerate(taken)
    )


def _add(items: dict[str, int], name: str, size: int) -> None:
    items[name] = items.get(name, 0) + size


def _location(device: Device) -> Location:
    return Location(str(device.node), f"{device.kind}:{device.index}")
