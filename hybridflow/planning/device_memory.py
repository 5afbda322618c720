"""Memory of one device, phase by phase: models that are trained or only run there, and the rank of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine3d.layout import Layout
from engine3d.memory import (
    Held,
    Serving,
    Working,
    held_by_rank,
    inference_peak,
    peer_memory,
    update_peak,
)
from engine3d.memory.overhead import (
    CONTEXT_BYTES,
    DRIVER_BYTES,
    ENGINE_PROCESSES_BYTES,
    MODEL_BYTES,
    TRAINING_PROCESS_BYTES,
    communicators,
    engine_workspace,
)
from engine3d.memory.serving import PREFIX_TOKENS, prompt_tokens
from engine3d.models import ModelSpec
from engine3d.rollout.config import RolloutConfig
from engine3d.training.config import TrainConfig
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe
from hybridflow.planning.memory_ledger import GpuMemory, Phase

GENERATE = "rollout"
"""Phase in which engines generate."""


@dataclass(frozen=True)
class RoleMemory:
    """A model's ranks: what each holds, and takes at work, by its device.

    Args:
        config: training settings of the role.
        setting: the name of `config`.
        trained: true if the role is trained.
        offload: true if the model is on its devices in its own turns only.
        can_offload: true if the role has the setting `offload`.
        layout: of the ranks.
    """

    config: TrainConfig
    setting: str
    trained: bool
    offload: bool
    can_offload: bool
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
    ) -> RoleMemory:
        config, trained = recipe.train_config(role), role in recipe.trained_roles
        if not one_step_experts:
            config = config.model_copy(update={"one_step_experts": False})
        layout = config.layout.layout(len(devices))
        samples = recipe.samples_per_step
        share = -(-samples // layout.dp)
        tokens = [max(sequence_tokens, min(config.micro_batch_tokens, share * sequence_tokens))]
        tokens.append(max(sequence_tokens, min(tokens[0], -(-share // recipe.trainer.mini_batches) * sequence_tokens)))
        peers = peer_memory(spec, layout, config, tokens=tokens[0])
        found = cls(
            config=config,
            setting=recipe.train_setting(role),
            trained=trained,
            offload=role in recipe.offloaded_roles,
            can_offload=role in recipe.models,
            layout=layout,
            held={},
            inference={},
            update={},
            peers=peers,
        )
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


def device_memory(
    engine: RolloutConfig,
    device: Device,
    actor: ModelSpec,
    ranks: Mapping[str, RoleMemory],
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
        in_turn[role] = {name: size for name, size in own.items() if size} if each.offload else {}
        always |= own if not each.offload else {}
        always[f"{role} dummy gradients"] = held.dummy_gradients
        always[f"{role} copies of experts' tokens"] = each.peers
        if alone:
            always[f"{role} gradients"] = held.gradients
    staying = {
        role: each.held[device].away
        for role, each in here.items()
        if each.trained and each.config.optimizer.overlap_offload and not each.offload
    }

    def left_by(roles: Iterable[str]) -> dict[str, int]:
        """Bytes on their way to host memory in the turns of others than these."""
        return {f"{role} optimizer on its way": staying[role] for role in roles if role in staying}

    def leave_earlier(roles: Iterable[str]) -> list[str]:
        settings = (here[role].setting for role in roles if role in staying)
        return [f"{setting}.optimizer.overlap_offload=false" for setting in sorted({*settings})]

    tokens, cache = 0, 0
    if serving is not None:
        weights = {"engine weights": serving.weights - serving.shared}
        always |= {} if engine.release_weights else weights
        tokens = _cache_tokens(engine, serving, here, device, size, cache_tokens)
        cache = tokens * serving.cache_of_a_token
        always["engine workspace"] = _engine_workspace(engine, actor, on_gpu=on_gpu) if estimate else 0
    if estimate and on_gpu:
        always["communicators"] = sum(communicators(each.layout) for each in here.values())
        always["libraries"] = MODEL_BYTES * len(here)
        always["driver"] = DRIVER_BYTES
    if on_gpu:
        always["runtime"] = CONTEXT_BYTES * (len(here) + (serving is not None))
    elif estimate:
        always["processes"] = TRAINING_PROCESS_BYTES * len(here) + ENGINE_PROCESSES_BYTES * (serving is not None)
    always = {name: size for name, size in always.items() if size}
    kept = {"KV cache": cache} if cache and not engine.memory_saver else {}
    phases = []
    if serving is not None:
        less = "a smaller rollout.engine.max_total_tokens or max_running_requests"
        if on_gpu:
            less = "a smaller rollout.engine.mem_fraction_static or max_total_tokens"
        less = ", ".join([less, *leave_earlier(here), *_leave(here)])
        items = dict(weights) if engine.release_weights else {}
        items |= {"KV cache": cache, "prefixes": min(tokens, PREFIX_TOKENS) * serving.prefix_of_a_token}
        if estimate:
            read = min(prompt_tokens(engine, size or 0), tokens)
            items["prompts"] = read * serving.prompt_of_a_token
        items |= left_by(here)
        phases.append(Phase(GENERATE, {name: size for name, size in items.items() if size}, less))
    for role, each in here.items():
        others = {other: ranks for other, ranks in here.items() if other != role}
        kept_here = kept | left_by(others)
        stay = [*_leave(others), *leave_earlier(others)]
        held_twice = always.get("engine weights", 0)
        advice = partial(
            _advice,
            each,
            cache=bool(kept),
            weights=held_twice if engine.memory_saver else 0,
            stay=stay,
            on_gpu=on_gpu,
        )
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
    return GpuMemory((), always, tuple(phases), tokens * engine.attention_dp)


def _engine_workspace(config: RolloutConfig, spec: ModelSpec, *, on_gpu: bool) -> int:
    # These import torch, which the other half of a ledger does without.
    from engine3d.platform.cuda.cuda_platform import graph_batch_sizes
    from engine3d.rollout.launch import most_requests
    from engine3d.rollout.scheduler.cascade_attention import table_bytes
    from engine3d.rollout.scheduler.peer_collectives import PEER_MEMORY

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
    ranks: RoleMemory,
    call: str,
    working: Working,
    *,
    cache: bool,
    weights: int,
    stay: Sequence[str],
    on_gpu: bool,
) -> str:
    """Settings with which a phase of training would need less, the cheapest first."""
    config, train = ranks.config, ranks.setting
    advice = []
    if cache and on_gpu:
        advice.append("rollout.engine.memory_saver=true")
    if weights:
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
    if ranks.trained and not config.optimizer.precision_aware:
        advice.append(f"{train}.optimizer.precision_aware=true")
    if ranks.trained and not config.optimizer.offload:
        advice.append(f"{train}.optimizer.offload=true")
    return ", ".join([*advice, f"more of tp, pp and ep in {train}.layout, or more GPUs"])


def _cache_tokens(
    engine: RolloutConfig,
    serving: Serving,
    here: Mapping[str, RoleMemory],
    device: Device,
    size: int | None,
    most: int | None,
) -> int:
    """Capacity of the KV cache in tokens, as SGLang works it out next to models that have made no update yet.

    Args:
        size: bytes of the GPU, or of the node whose memory the engine may take, if that is known.
        most: that it is asked to have.
    """
    if not serving.cache_of_a_token:
        return 0
    most = None if most is None else -(-most // engine.attention_dp)  # of the groups of ranks with caches of their own
    if size is None:
        assert most is not None
        return most
    taken = sum(
        held.dummy_gradients + (0 if offload else held.weights)
        for held, offload in ((each.held[device], each.offload) for each in here.values())
    )
    others = DRIVER_BYTES + CONTEXT_BYTES * (len(here) + 1) if device.kind == "cuda" else 0
    left = engine.mem_fraction_static * (size - taken - others) - (serving.weights - serving.shared)
    found = max(0, int(left // serving.cache_of_a_token))
    return found if most is None else min(found, most)


def _leave(ranks: Mapping[str, RoleMemory]) -> list[str]:
    """The settings by which models would leave that now stay."""
    return [f"{role}.offload=true" for role, each in ranks.items() if each.can_offload and not each.offload]
