"""The memory ledger: what every GPU of a run is going to hold, phase by phase, foreseen from the recipe alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine3d.checkpoint.plan import plan_checkpoint
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.memory import Held, Serving, Working, held_by_rank, inference_peak, serving_by_rank, update_peak
from engine3d.memory.overhead import CONTEXT_BYTES, DRIVER_BYTES, MODEL_BYTES, communicators, engine_workspace
from engine3d.memory.serving import PREFIX_TOKENS, prompt_tokens
from engine3d.models import ModelSpec
from engine3d.platform.cuda import graph_batch_sizes
from engine3d.reshard.shards import Place
from engine3d.reshard.source import PlannedTrainer
from engine3d.rollout.launch import most_requests
from hybridflow.config import Recipe
from hybridflow.devices import Device

GENERATE = "rollout"
_NOTHING = Serving(weights=0, shared=0, cache_of_a_token=0, prefix_of_a_token=0, prompt_of_a_token=0)


@dataclass(frozen=True)
class Phase:
    """The worst moment of a phase on a GPU.

    Args:
        name: of the phase and of the role that is at work.
        items: what is there beside what always is, by name, in bytes.
        less: the settings that would make it less.
    """

    name: str
    items: Mapping[str, int]
    less: str


@dataclass(frozen=True)
class GpuMemory:
    """What some GPUs hold, all of them alike.

    Args:
        devices: that are alike, in order.
        always: what is there in every phase once the first update is made, by name, in bytes.
        phases: in the order of a step.
        cache_tokens: that the KV cache has room for; 0 where no engine runs.
    """

    devices: tuple[Device, ...]
    always: Mapping[str, int]
    phases: tuple[Phase, ...]
    cache_tokens: int

    def total(self, phase: Phase) -> int:
        """Bytes of all that is there in a phase."""
        return sum(self.always.values()) + sum(phase.items.values())

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=self.total)


@dataclass(frozen=True)
class HostMemory:
    """What is taken of a node's memory.

    Args:
        items: by name, in bytes.
        less: the setting that would make the largest of them less.
    """

    items: Mapping[str, int]
    less: str

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class Ledger:
    """What a run is going to hold.

    Args:
        gpus: in order of the first of the devices that are alike.
        gpu_bytes: of each GPU; None where that is not known.
        hosts: what is taken of each node's memory.
        sequence_tokens: of the longest prompt with its response.
        requests: that an engine is to run at once.
        host_bytes: of each node's memory; None where that is not known.
    """

    gpus: tuple[GpuMemory, ...]
    gpu_bytes: int | None
    hosts: tuple[HostMemory, ...]
    sequence_tokens: int
    requests: int
    host_bytes: int | None = None

    def lines(self) -> list[str]:
        """As it is shown: for each kind of GPU every phase with what is there, in GB (1e9 bytes)."""
        found = []
        for gpu in self.gpus:
            room = f", KV cache of {gpu.cache_tokens:,} tokens" if gpu.cache_tokens else ""
            if gpu.cache_tokens and (fit := gpu.cache_tokens // self.sequence_tokens) < self.requests:
                room += f": {fit} of {self.requests} requests at once, where all are of {self.sequence_tokens} tokens"
            has = "" if self.gpu_bytes is None else f" of {self.gpu_bytes / 1e9:.1f}"
            most = f"{gpu.total(gpu.worst) / 1e9:.1f}{has} GB in {gpu.worst.name}"
            found.append(f"{_names(gpu.devices)}: at most {most}{room}")
            found.append(_line("always", sum(gpu.always.values()), gpu.always))
            found += [_line(phase.name, gpu.total(phase), phase.items, "+ ") for phase in gpu.phases]
        for node, host in enumerate(self.hosts):
            if host.items:
                taken = f"{host.total / 1e9:.1f} GB of host memory, page-locked: {_items(host.items)}"
                found.append(f"node {node}: {taken}")
        return found

    def check(self) -> None:
        """Refuse a run that cannot fit, as far as sizes are known.

        Raises:
            UserError: names the first GPU or node, the phase, what is there, and what to change.
        """
        for gpu in self.gpus:
            worst, total = gpu.worst, gpu.total(gpu.worst)
            if self.gpu_bytes is not None and total > self.gpu_bytes:
                items = _items({**gpu.always, **worst.items})
                raise UserError(
                    f"{_names(gpu.devices)}: {total / 1e9:.1f} GB in phase {worst.name} on a GPU of "
                    f"{self.gpu_bytes / 1e9:.1f} GB ({items}); to need less: {worst.less}"
                )
        for node, host in enumerate(self.hosts):
            if self.host_bytes is not None and host.total > self.host_bytes:
                raise UserError(
                    f"node {node}: {host.total / 1e9:.1f} GB of host memory, page-locked, on a node of "
                    f"{self.host_bytes / 1e9:.1f} GB ({_items(host.items)}); to need less: {host.less}, or more nodes"
                )


def foresee(
    recipe: Recipe,
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    *,
    gpu_bytes: int | None,
    sequence_tokens: int,
    host_bytes: int | None = None,
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
        with_engines: false leaves out the engines' weights and caches, checkpoints on their way to files, and what is
            only estimated: what is left is known at once, without SGLang, and certain.
        one_step_experts: whether the GPUs can make one step of what experts do, as Hopper's can.
    """
    ranks = {
        role: _Ranks.of(recipe, role, devices[role], specs[role], sequence_tokens, one_step_experts) for role in specs
    }
    engines = _engines(recipe, devices, specs["actor"]) if with_engines else dict.fromkeys(devices["rollout"], _NOTHING)
    every = sorted({device for role in (*specs, "rollout") for device in devices[role] if device.kind == "cuda"})
    gpus: list[GpuMemory] = []
    for device in every:
        found = _gpu(recipe, device, specs, ranks, engines, gpu_bytes, estimate=with_engines)
        like = next((number for number, gpu in enumerate(gpus) if replace(gpu, devices=()) == found), None)
        if like is None:
            gpus.append(replace(found, devices=(device,)))
        else:
            gpus[like] = replace(gpus[like], devices=(*gpus[like].devices, device))
    return Ledger(
        tuple(gpus),
        gpu_bytes,
        _hosts(recipe, devices, specs, ranks, checkpoints=with_engines),
        sequence_tokens,
        recipe.rollout.engine.max_running_requests,
        host_bytes,
    )


@dataclass(frozen=True)
class _Ranks:
    """A model's ranks: what each holds, and takes at work, by its device."""

    trained: bool
    layout: Layout
    held: dict[Device, Held]
    inference: dict[Device, Working]
    update: dict[Device, Working]

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
        samples = recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt
        share = -(-samples // layout.dp)
        tokens = [max(sequence_tokens, min(config.micro_batch_tokens, share * sequence_tokens))]
        tokens.append(max(sequence_tokens, min(tokens[0], -(-share // recipe.trainer.mini_batches) * sequence_tokens)))
        found = cls(trained, layout, {}, {}, {})
        first: dict[tuple[int, ...], Device] = {}
        for (_, at), device in zip(layout.ranks(), devices, strict=True):
            like = first.setdefault((at.pp, at.tp, at.ep, at.etp), device)
            if like == device:
                found.held[device] = held_by_rank(spec, layout, at, config, trainable=trained)
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
        numbered = spec.of_trainer(layout, transformer_engine=True)
        planned = PlannedTrainer(numbered, layout, getattr(torch, config.dtype))
        sources = [planned.shards(rank, _place(device)) for rank, device in enumerate(devices["actor"])]
    serving = serving_by_rank(spec, recipe.rollout.engine, places, sources)
    return dict(zip(devices["rollout"], serving, strict=True))


def _gpu(
    recipe: Recipe,
    device: Device,
    specs: Mapping[str, ModelSpec],
    ranks: Mapping[str, _Ranks],
    engines: Mapping[Device, Serving],
    gpu_bytes: int | None,
    *,
    estimate: bool,
) -> GpuMemory:
    here = {role: each for role, each in ranks.items() if device in each.held}
    serving = engines.get(device)
    # Whoever shares a GPU gives back what only an update needs when the turn goes to another.
    alone = len(here) + (serving is not None) == 1
    always: dict[str, int] = {}
    for role, each in here.items():
        held = each.held[device]
        always[f"{role} weights"] = held.weights
        always[f"{role} optimizer"] = held.optimizer - _away(recipe, role, held)
        always[f"{role} dummy gradients"] = held.dummy_gradients
        if alone:
            always[f"{role} gradients"] = held.gradients
    tokens, cache = 0, 0
    if serving is not None:
        always["engine weights"] = serving.weights - serving.shared
        tokens = _cache_tokens(recipe, serving, here, device, gpu_bytes)
        cache = tokens * serving.cache_of_a_token
        always["engine workspace"] = _engine_workspace(recipe, specs["actor"]) if estimate else 0
    if estimate:
        always["communicators"] = sum(communicators(each.layout) for each in here.values())
        always["libraries"] = MODEL_BYTES * len(here)
        always["driver"] = DRIVER_BYTES
    always["runtime"] = CONTEXT_BYTES * (len(here) + (serving is not None))
    always = {name: size for name, size in always.items() if size}
    kept = {"KV cache": cache} if cache and not recipe.rollout.engine.memory_saver else {}
    phases = []
    if serving is not None:
        less = "a smaller rollout.engine.mem_fraction_static or max_total_tokens"
        items = {"KV cache": cache, "prefixes": min(tokens, PREFIX_TOKENS) * serving.prefix_of_a_token}
        if estimate:
            assert gpu_bytes is not None
            items["prompts"] = prompt_tokens(recipe.rollout.engine, gpu_bytes) * serving.prompt_of_a_token
        phases.append(Phase(GENERATE, {name: size for name, size in items.items() if size}, less))
    for role, each in here.items():
        advice = partial(_advice, recipe, role, cache=bool(kept))
        phases.append(Phase(f"infer of {role}", kept | _at_work(each.inference[device]), advice("infer")))
        if each.trained:
            gradients = {} if alone else {"gradients": each.held[device].gradients}
            working = _at_work(each.update[device])
            if _offloads(recipe, role) and each.held[device].staged > sum(working.values()):
                working = {"optimizer": each.held[device].staged}
            items = kept | gradients | working
            phases.append(Phase(f"update of {role}", items, advice("update")))
    return GpuMemory((), always, tuple(phases), tokens)


def _engine_workspace(recipe: Recipe, spec: ModelSpec) -> int:
    config = recipe.rollout.engine
    requests = most_requests(config)
    return engine_workspace(
        requests=requests,
        vocabulary=spec.vocab_size,
        layers=spec.sizes.layers,
        graphs=len(graph_batch_sizes(requests)) if config.cuda_graph else 0,
        tp=config.tp,
    )


def _at_work(working: Working) -> dict[str, int]:
    end = {"logits": working.logits} if working.logits >= working.layer else {"one layer": working.layer}
    return {name: size for name, size in ({"activations": working.activations} | end).items() if size}


def _advice(recipe: Recipe, role: str, call: str, *, cache: bool) -> str:
    """What would make a phase of training need less, the cheapest first."""
    config, train = recipe.train_config(role), recipe.train_setting(role)
    advice = []
    if cache:
        advice.append("rollout.engine.memory_saver=true")
    if call == "update" and config.recompute != "full":
        advice.append(f"{train}.recompute=full")
    elif call == "update" and config.recompute_layers is not None:
        advice.append(f"more of {train}.recompute_layers")
    advice.append(f"a smaller {train}.micro_batch_tokens")
    if role in recipe.trained_roles and not config.optimizer.precision_aware:
        advice.append(f"{train}.optimizer.precision_aware=true")
    if role in recipe.trained_roles and not config.optimizer.offload:
        advice.append(f"{train}.optimizer.offload=true")
    return ", ".join([*advice, f"more of tp, pp and ep in {train}.layout, or more GPUs"])


def _cache_tokens(
    recipe: Recipe, serving: Serving, here: Mapping[str, _Ranks], device: Device, gpu_bytes: int | None
) -> int:
    """How many tokens the KV cache has room for, as SGLang works it out beside models that have made no update yet."""
    engine = recipe.rollout.engine
    if not serving.cache_of_a_token:
        return 0
    assert gpu_bytes is not None
    taken = sum(held.weights + held.dummy_gradients for held in (each.held[device] for each in here.values()))
    free = gpu_bytes - taken - DRIVER_BYTES - CONTEXT_BYTES * (len(here) + 1)
    left = engine.mem_fraction_static * free - (serving.weights - serving.shared)
    found = max(0, int(left // serving.cache_of_a_token))
    return found if engine.max_total_tokens is None else min(found, engine.max_total_tokens)


def _hosts(
    recipe: Recipe,
    devices: Mapping[str, Sequence[Device]],
    specs: Mapping[str, ModelSpec],
    ranks: Mapping[str, _Ranks],
    *,
    checkpoints: bool,
) -> tuple[HostMemory, ...]:
    nodes = 1 + max(device.node for role in (*specs, "rollout") for device in devices[role])
    found: list[dict[str, int]] = [{} for _ in range(nodes)]
    less = {}
    for role in recipe.trained_roles:
        config, name = recipe.train_config(role), f"{role} optimizer"
        less[name] = f"{recipe.train_setting(role)}.optimizer.offload=false"
        for device, held in ranks[role].held.items():
            if state := _away(recipe, role, held):
                _add(found[device.node], name, state)
        if checkpoints and recipe.checkpoint.saves_in_background:
            layout: Layout = config.layout.layout(len(devices[role]))
            plan = plan_checkpoint(specs[role], layout, precision_aware=config.optimizer.precision_aware)
            less[name := "checkpoints that are being written"] = "checkpoint.async_save=false"
            for rank, device in zip(plan.ranks, devices[role], strict=True):
                _add(found[device.node], name, rank.host)
    return tuple(HostMemory(items, less[max(items, key=items.__getitem__)] if items else "") for items in found)


def _add(items: dict[str, int], name: str, size: int) -> None:
    items[name] = items.get(name, 0) + size


def _away(recipe: Recipe, role: str, held: Held) -> int:
    """Of the optimizer's state, what is in host memory."""
    return held.optimizer - held.masters if _offloads(recipe, role) else 0


def _offloads(recipe: Recipe, role: str) -> bool:
    return role in recipe.trained_roles and recipe.train_config(role).optimizer.offload


def _place(device: Device) -> Place:
    return Place(str(device.node), f"{device.kind}:{device.index}")


def _names(devices: Sequence[Device]) -> str:
    first = devices[0]
    more = f" and {len(devices) - 1} like it" if len(devices) > 1 else ""
    return f"GPU {first.index} of node {first.node}{more}"


def _line(name: str, total: int, items: Mapping[str, int], before: str = "") -> str:
    return f"  {name:<22}{total / 1e9:>7.1f}  {before}{_items(items)}"


def _items(items: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in items.items() if size >= 5e7)
