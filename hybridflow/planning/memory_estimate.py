"""The memory ledger: what every GPU and CPU slot of a run will hold, phase by phase, foreseen from the recipe alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engine3d.checkpoint.plan import plan_checkpoint
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.memory import (
    Held,
    Serving,
    Working,
    held_by_rank,
    inference_peak,
    peer_memory,
    serving_by_rank,
    update_peak,
)
from engine3d.memory.overhead import (
    CONTEXT_BYTES,
    DRIVER_BYTES,
    ENGINE_PROCESSES_BYTES,
    MODEL_BYTES,
    RUN_PROCESSES_BYTES,
    TRAINING_PROCESS_BYTES,
    communicators,
    engine_workspace,
)
from engine3d.memory.serving import PREFIX_TOKENS, prompt_tokens
from engine3d.models import ModelSpec, load_model_spec
from engine3d.reshard.describe.shards import Place
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.rollout.cache import PAGE_TOKENS, tokens_needed
from engine3d.rollout.config import RolloutConfig
from engine3d.startup.lazy_imports import torch
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import JudgeModel
from hybridflow.planning.memory_ledger import GpuMemory, HostMemory, Ledger, Phase
from hybridflow.planning.sample_memory import replay_bytes

GENERATE = "rollout"
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
        role: _Ranks.of(recipe, role, devices[role], specs[role], sequence_tokens, one_step_experts) for role in specs
    }
    engines: dict[Device, Serving] = dict.fromkeys(devices.get("rollout", ()), _NOTHING)
    if with_engines and engines:
        engines = _engines(recipe, devices, specs["actor"])
    if cache_tokens is None:
        cache_tokens = recipe.rollout.engine.max_total_tokens
    gpus: list[GpuMemory] = []
    for device in sorted({device for role in (*specs, "rollout") for device in devices.get(role, ())}):
        size = gpu_bytes if device.kind == "cuda" else host_bytes
        found = _gpu(recipe, device, specs, ranks, engines, size, cache_tokens, estimate=with_engines)
        like = next((number for number, gpu in enumerate(gpus) if replace(gpu, devices=()) == found), None)
        if like is None:
            gpus.append(replace(found, devices=(device,)))
        else:
            gpus[like] = replace(gpus[like], devices=(*gpus[like].devices, device))
    if recipe.teacher_engine is not None:
        teacher = recipe.teacher
        assert teacher is not None
        served = Served("teacher", "infer of teacher", teacher.path, recipe.teacher_engine)
        gpus += _of_served(recipe, served, devices["teacher"], gpu_bytes, host_bytes, cache_tokens, with_engines)
    if recipe.asked_judge is not None and (judge := _served_judge(recipe.asked_judge)) is not None:
        gpus += _of_served(recipe, judge, devices["judge"], gpu_bytes, host_bytes, None, with_engines)
    return Ledger(
        tuple(gpus),
        gpu_bytes,
        _hosts(recipe, devices, specs, ranks, gpus, sequence_tokens, estimate=with_engines),
        sequence_tokens,
        recipe.rollout.engine.max_running_requests,
        host_bytes,
    )


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
    recipe: Recipe,
    model: Served,
    devices: Sequence[Device],
    gpu_bytes: int | None,
    host_bytes: int | None,
    cache_tokens: int | None,
    with_engines: bool,
) -> list[GpuMemory]:
    """The devices of a model that engines serve, which have them to themselves: as of engines that generate."""
    spec, config = load_model_spec(model.path), model.config
    served = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": config})})
    engines = dict.fromkeys(devices, _NOTHING)
    if with_engines:
        serving = serving_by_rank(spec, config, [_place(device) for device in devices])
        engines = dict(zip(devices, serving, strict=True))
    size = gpu_bytes if devices[0].kind == "cuda" else host_bytes
    tokens = config.max_total_tokens if config.max_total_tokens is not None else cache_tokens
    found = _gpu(served, devices[0], {"actor": spec}, {}, engines, size, tokens, estimate=with_engines)
    phases = tuple(
        replace(phase, name=model.phase, less=phase.less.replace("rollout.engine", f"{model.role}.engine"))
        for phase in found.phases
    )
    return [replace(found, devices=tuple(devices), phases=phases)]


@dataclass(frozen=True)
class _Ranks:
    """A model's ranks: what each holds, and takes at work, by its device."""

    trained: bool
    layout: Layout
    held: dict[Device, Held]
    inference: dict[Device, Working]
    update: dict[Device, Working]
    peers: int
    """Bytes of a rank into which others copy."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        role: str,
        devices: Sequence[Device],
        spec: ModelSpec,
        sequence_tokens: int,
        one_step_experts: bool,
    ) -> _Ranks:
        config, trained = recipe.train_config(role), role in recipe.trained_roles
        if not one_step_experts:
            config = config.model_copy(update={"one_step_experts": False})
        layout = config.layout.layout(len(devices))
        samples = recipe.samples_per_step
        share = -(-samples // layout.dp)
        tokens = [max(sequence_tokens, min(config.micro_batch_tokens, share * sequence_tokens))]
        tokens.append(max(sequence_tokens, min(tokens[0], -(-share // recipe.trainer.mini_batches) * sequence_tokens)))
        peers = peer_memory(spec, layout, config, tokens=tokens[0])
        found = cls(trained, layout, {}, {}, {}, peers)
        transformer_engine = devices[0].kind == "cuda"
        first: dict[tuple[int, ...], Device] = {}
        for (_, at), device in zip(layout.ranks(), devices, strict=True):
            like = first.setdefault((at.pp, at.tp, at.ep, at.etp), device)
            if like == device:
                found.held[device] = held_by_rank(
                    spec, layout, at, config, trainable=trained, transformer_engine=transformer_engine
                )
                found.inference[device] = inference_peak(spec, layout, at, config, tokens=tokens[0])
                found.update[device] = update_peak(spec, layout, at, config, tokens=tokens[1])
            else:  # data-parallel ranks hold as much as each other
                found.held[device] = found.held[like]
                found.inference[device] = found.inference[like]
                found.update[device] = found.update[like]
        return found


def _engines(recipe: Recipe, devices: Mapping[str, Sequence[Device]], spec: ModelSpec) -> dict[Device, Serving]:
    """What every rank of every engine holds, by its device."""
    places = [_place(device) for device in devices["rollout"]]
    config = recipe.train
    sources = []
    if recipe.rollout.weights.share and set(devices["actor"]) & set(devices["rollout"]):
        layout = config.layout.layout(len(devices["actor"]))
        transformer_engine = devices["actor"][0].kind == "cuda"
        numbered = spec.of_trainer(layout, transformer_engine=transformer_engine)
        planned = PlannedTrainer(numbered, layout, getattr(torch, config.dtype), transformer_engine=transformer_engine)
        sources = [planned.shards(rank, _place(device)) for rank, device in enumerate(devices["actor"])]
    serving = serving_by_rank(spec, recipe.rollout.engine, places, sources)
    return dict(zip(devices["rollout"], serving, strict=True))


def _gpu(
    recipe: Recipe,
    device: Device,
    specs: Mapping[str, ModelSpec],
    ranks: Mapping[str, _Ranks],
    engines: Mapping[Device, Serving],
    size: int | None,
    cache_tokens: int | None,
    *,
    estimate: bool,
) -> GpuMemory:
    on_gpu = device.kind == "cuda"
    here = {role: each for role, each in ranks.items() if device in each.held}
    serving = engines.get(device)
    # Whoever shares a GPU gives back what only an update needs when the turn goes to another.
    alone = len(here) + (serving is not None) == 1
    always: dict[str, int] = {}
    in_turn: dict[str, dict[str, int]] = {}
    for role, each in here.items():
        held = each.held[device]
        own = {f"{role} weights": held.weights, f"{role} optimizer": held.optimizer - held.away}
        in_turn[role] = {name: size for name, size in own.items() if size} if _leaves(recipe, role) else {}
        always |= own if not _leaves(recipe, role) else {}
        always[f"{role} dummy gradients"] = held.dummy_gradients
        always[f"{role} copies of experts' tokens"] = each.peers
        if alone:
            always[f"{role} gradients"] = held.gradients
    staying = {
        role: each.held[device].away
        for role, each in here.items()
        if each.trained and recipe.train_config(role).optimizer.overlap_offload and not _leaves(recipe, role)
    }

    def left_by(roles: Iterable[str]) -> dict[str, int]:
        """What is on its way to host memory in the turns of others than these."""
        return {f"{role} optimizer on its way": staying[role] for role in roles if role in staying}

    def leave_earlier(roles: Iterable[str]) -> list[str]:
        settings = (recipe.train_setting(role) for role in roles if role in staying)
        return [f"{setting}.optimizer.overlap_offload=false" for setting in sorted({*settings})]

    tokens, cache = 0, 0
    if serving is not None:
        weights = {"engine weights": serving.weights - serving.shared}
        always |= {} if recipe.rollout.engine.release_weights else weights
        tokens = _cache_tokens(recipe, serving, here, device, size, cache_tokens)
        cache = tokens * serving.cache_of_a_token
        always["engine workspace"] = _engine_workspace(recipe, specs["actor"], on_gpu=on_gpu) if estimate else 0
    if estimate and on_gpu:
        always["communicators"] = sum(communicators(each.layout) for each in here.values())
        always["libraries"] = MODEL_BYTES * len(here)
        always["driver"] = DRIVER_BYTES
    if on_gpu:
        always["runtime"] = CONTEXT_BYTES * (len(here) + (serving is not None))
    elif estimate:
        always["processes"] = TRAINING_PROCESS_BYTES * len(here) + ENGINE_PROCESSES_BYTES * (serving is not None)
    always = {name: size for name, size in always.items() if size}
    kept = {"KV cache": cache} if cache and not recipe.rollout.engine.memory_saver else {}
    phases = []
    if serving is not None:
        less = "a smaller rollout.engine.max_total_tokens or max_running_requests"
        if on_gpu:
            less = "a smaller rollout.engine.mem_fraction_static or max_total_tokens"
        less = ", ".join([less, *leave_earlier(here), *_leave(recipe, here)])
        items = dict(weights) if recipe.rollout.engine.release_weights else {}
        items |= {"KV cache": cache, "prefixes": min(tokens, PREFIX_TOKENS) * serving.prefix_of_a_token}
        if estimate:
            read = min(prompt_tokens(recipe.rollout.engine, size or 0), tokens)
            items["prompts"] = read * serving.prompt_of_a_token
        items |= left_by(here)
        phases.append(Phase(GENERATE, {name: size for name, size in items.items() if size}, less))
    for role, each in here.items():
        others = [other for other in here if other != role]
        kept_here = kept | left_by(others)
        stay = [*_leave(recipe, others), *leave_earlier(others)]
        held_twice = always.get("engine weights", 0)
        advice = partial(_advice, recipe, role, cache=bool(kept), weights=held_twice, stay=stay, on_gpu=on_gpu)
        phases.append(
            Phase(
                f"infer of {role}",
                kept_here | in_turn[role] | _at_work(each.inference[device]),
                advice("infer", each.inference[device]),
            )
        )
        if each.trained:
            gradients = {} if alone else {"gradients": each.held[device].gradients}
            at_work, staged = each.update[device], each.held[device].staged
            working = _at_work(at_work) if at_work.peak >= staged else {"optimizer": staged}
            items = kept_here | in_turn[role] | gradients | working
            phases.append(Phase(f"update of {role}", items, advice("update", at_work)))
    return GpuMemory((), always, tuple(phases), tokens * recipe.rollout.engine.attention_dp)


def _engine_workspace(recipe: Recipe, spec: ModelSpec, *, on_gpu: bool) -> int:
    # These import torch, which the other half of a ledger does without.
    from engine3d.platform.cuda.cuda_platform import graph_batch_sizes
    from engine3d.rollout.launch import most_requests
    from engine3d.rollout.scheduler.cascade_attention import table_bytes
    from engine3d.rollout.scheduler.peer_collectives import PEER_MEMORY

    config = recipe.rollout.engine
    requests = most_requests(config)
    workspace = engine_workspace(
        requests=requests,
        vocabulary=spec.vocab_size,
        layers=spec.sizes.layers,
        graphs=len(graph_batch_sizes(requests)) if config.cuda_graph and on_gpu else 0,
        tp=config.tp if on_gpu else 1,
    )
    if config.peer_collectives and on_gpu:
        workspace += PEER_MEMORY
    if config.cascade_attention and on_gpu:
        workspace += table_bytes(requests, config.context_length or spec.sizes.max_positions)
    return workspace


def _at_work(working: Working) -> dict[str, int]:
    end = {"logits": working.logits} if working.logits >= working.layer else {"one layer": working.layer}
    return {name: size for name, size in ({"activations": working.activations} | end).items() if size}


def _advice(
    recipe: Recipe,
    role: str,
    call: str,
    working: Working,
    *,
    cache: bool,
    weights: int,
    stay: Sequence[str],
    on_gpu: bool,
) -> str:
    """What would make a phase of training need less, the cheapest first."""
    config, train = recipe.train_config(role), recipe.train_setting(role)
    advice = []
    if cache and on_gpu:
        advice.append("rollout.engine.memory_saver=true")
    if weights and recipe.rollout.engine.memory_saver:
        advice.append("rollout.engine.release_weights=true with rollout.weights.share=false")
    advice += stay
    if call == "update" and config.recompute != "full":
        advice.append(f"{train}.recompute=full")
    elif call == "update" and config.recompute_layers is not None:
        advice.append(f"more of {train}.recompute_layers")
    if working.logits > working.layer:
        advice.append(f"{train}.logits_tokens" if config.logits_tokens is None else f"a smaller {train}.logits_tokens")
    advice.append(f"a smaller {train}.micro_batch_tokens")
    if not on_gpu:
        return ", ".join(advice)
    if role in recipe.trained_roles and not config.optimizer.precision_aware:
        advice.append(f"{train}.optimizer.precision_aware=true")
    if role in recipe.trained_roles and not config.optimizer.offload:
        advice.append(f"{train}.optimizer.offload=true")
    return ", ".join([*advice, f"more of tp, pp and ep in {train}.layout, or more GPUs"])


def _cache_tokens(
    recipe: Recipe,
    serving: Serving,
    here: Mapping[str, _Ranks],
    device: Device,
    size: int | None,
    most: int | None,
) -> int:
    """How many tokens the KV cache has room for, as SGLang works it out beside models that have made no update yet.

    Args:
        size: bytes of the GPU, or of the node whose memory the engine may take, if that is known.
        most: that it is asked to have.
    """
    engine = recipe.rollout.engine
    if not serving.cache_of_a_token:
        return 0
    most = None if most is None else -(-most // engine.attention_dp)  # of the groups of ranks with caches of their own
    if size is None:
        assert most is not None
        return most
    taken = sum(
        held.dummy_gradients + (0 if _leaves(recipe, role) else held.weights)
        for role, held in ((role, each.held[device]) for role, each in here.items())
    )
    others = DRIVER_BYTES + CONTEXT_BYTES * (len(here) + 1) if device.kind == "cuda" else 0
    left = engine.mem_fraction_static * (size - taken - others) - (serving.weights - serving.shared)
    found = max(0, int(left // serving.cache_of_a_token))
    return found if most is None else min(found, most)


def _hosts(
    recipe: Recipe,
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    ranks: Mapping[str, _Ranks],
    gpus: Sequence[GpuMemory],
    sequence_tokens: int,
    *,
    estimate: bool,
) -> tuple[HostMemory, ...]:
    nodes = 1 + max(device.node for held in devices.values() for device in held)
    found: list[dict[str, int]] = [{} for _ in range(nodes)]
    less = {}
    for role in recipe.offloaded_roles:
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
    kept = replay_bytes(recipe, sequence_tokens)  # by the driver, which is on the first node
    if kept:
        less[name := "replay buffer"] = "a smaller algorithm.replay_buffer_size"
        _add(found[0], name, kept)
    for role in recipe.trained_roles:
        config, name = recipe.train_config(role), f"{role} optimizer"
        less[name] = f"{recipe.train_setting(role)}.optimizer.offload=false"
        for device, held in ranks[role].held.items():
            if held.away:
                _add(found[device.node], name, held.away)
        if estimate and recipe.checkpoint.saves_in_background:
            layout: Layout = config.layout.layout(len(devices[role]))
            plan = plan_checkpoint(specs[role], layout, precision_aware=config.optimizer.precision_aware)
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


def _leaves(recipe: Recipe, role: str) -> bool:
    """Whether a model is on its devices in its own turns only."""
    return role in recipe.offloaded_roles


def _leave(recipe: Recipe, roles: Iterable[str]) -> list[str]:
    """The settings by which models would leave that now stay."""
    return [f"{role}.offload=true" for role in roles if role in recipe.models and not _leaves(recipe, role)]


def _place(device: Device) -> Place:
    return Place(str(device.node), f"{device.kind}:{device.index}")
