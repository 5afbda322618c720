"""Memory of one device, phase by phase: models that are trained or only run there, and the rank of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine3d.layout import Layout
from engine3d.memory import (
    CopiedBytes,
    ResidentBytes,
    ServingBytes,
    WorkingBytes,
    copied_by_rank,
    inference_peak,
    resident_by_rank,
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
from engine3d.models.precision import Precision
from engine3d.rollout.config import RolloutConfig
from hybridflow.cluster.devices.device_map import Device
from hybridflow.planning.memory.ledger import GpuMemory, MemoryPhase
from hybridflow.roles.config import MegatronRole

GENERATE = "rollout"
"""Phase in which engines generate."""


@dataclass(frozen=True)
class RoleMemory:
    """A model's ranks: what each holds, and takes at work, by its device.

    Args:
        role: with its settings.
        layout: of the ranks.
        stages: pipeline stage of each.
    """

    role: MegatronRole
    layout: Layout
    stages: dict[Device, int]
    resident: dict[Device, ResidentBytes]
    inference: dict[Device, WorkingBytes]
    update: dict[Device, WorkingBytes]
    copies: dict[Device, CopiedBytes]

    @classmethod
    def of(
        cls,
        role: MegatronRole,
        devices: Sequence[Device],
        spec: ModelSpec,
        *,
        samples: int,
        mini_batches: int,
        sequence_tokens: int,
        fused_experts: bool,
        engine_precision: Precision | None = None,
        serves: bool = False,
    ) -> RoleMemory:
        if not fused_experts:
            role = replace(role, train=role.train.model_copy(update={"fused_experts": False}))
        config, trained = role.train, role.trained
        layout = config.layout.layout(len(devices))
        share = -(-samples // layout.dp)
        of_update = -(-share // mini_batches)
        tokens = [max(sequence_tokens, min(config.micro_batch_tokens, share * sequence_tokens))]
        tokens.append(max(sequence_tokens, min(tokens[0], of_update * sequence_tokens)))
        micro_batches = -(-of_update // (tokens[1] // sequence_tokens))
        memory = cls(
            role=role,
            layout=layout,
            stages={},
            resident={},
            inference={},
            update={},
            copies={},
        )
        transformer_engine = devices[0].kind == "cuda"
        first: dict[int, Device] = {}
        for (_, at), device in zip(layout.ranks(), devices, strict=True):
            memory.stages[device] = at.pp
            like = first.setdefault(at.pp, device)
            if like == device:
                memory.resident[device] = resident_by_rank(
                    spec, layout, at, config, trainable=trained, transformer_engine=transformer_engine
                )
                memory.copies[device] = copied_by_rank(
                    spec,
                    layout,
                    at,
                    config,
                    tokens=tokens[0],
                    serves=serves,
                    engine_precision=engine_precision,
                    transformer_engine=transformer_engine,
                )
                memory.inference[device] = inference_peak(spec, layout, at, config, tokens=tokens[0])
                memory.update[device] = update_peak(
                    spec, layout, at, config, tokens=tokens[1], micro_batches=micro_batches
                )
            else:  # the ranks of a stage hold as much as each other
                memory.resident[device] = memory.resident[like]
                memory.copies[device] = memory.copies[like]
                memory.inference[device] = memory.inference[like]
                memory.update[device] = memory.update[like]
        return memory


def device_memory(
    engine: RolloutConfig,
    device: Device,
    actor: ModelSpec,
    ranks: Mapping[str, RoleMemory],
    engines: Mapping[Device, ServingBytes],
    size: int | None,
    cache_tokens: int | None,
    *,
    estimate: bool,
) -> GpuMemory:
    on_gpu = device.kind == "cuda"
    here = {role: memory for role, memory in ranks.items() if device in memory.resident}
    serving = engines.get(device)
    # A role that shares a GPU releases what only an update needs when the turn goes to another.
    alone = len(here) + (serving is not None) == 1
    always: dict[str, int] = {}
    in_turn: dict[str, dict[str, int]] = {}
    for role, memory in here.items():
        resident = memory.resident[device]
        states = {f"{role} weights": resident.weights, f"{role} optimizer": resident.optimizer - resident.offloaded}
        in_turn[role] = {name: size for name, size in states.items() if size} if memory.role.offload else {}
        always |= states if not memory.role.offload else {}
        always[f"{role} dummy gradients"] = resident.dummy_gradients
        copies = memory.copies[device]
        always[f"{role} copies of experts' tokens"] = copies.tokens
        always[f"{role} weights in fp8"] = copies.quantised
        always[f"{role} operands in fp8"] = copies.operands
        always[f"{role} weights with adapters"] = copies.merged
        if alone:
            always[f"{role} gradients"] = resident.gradients
    staying = {
        role: memory.resident[device].offloaded
        for role, memory in here.items()
        if memory.role.trained and memory.role.train.optimizer.overlap_offload and not memory.role.offload
    }

    def left_by(roles: Iterable[str]) -> dict[str, int]:
        """Bytes on their way to host memory in the turns of others than these."""
        return {f"{role} optimizer on its way": staying[role] for role in roles if role in staying}

    def leave_earlier(roles: Iterable[str]) -> list[str]:
        settings = (here[role].role.setting for role in roles if role in staying)
        return [f"{setting}.optimizer.overlap_offload=false" for setting in sorted({*settings})]

    tokens, cache = 0, 0
    if serving is not None:
        weights = {"engine weights": serving.weights - serving.shared}
        always |= {} if engine.release_weights else weights
        tokens = _cache_tokens(engine, serving, here, device, size, cache_tokens)
        cache = tokens * serving.cache_of_a_token + serving.states
        always["engine workspace"] = rank_workspace(engine, actor, on_gpu=on_gpu) if estimate else 0
    if estimate and on_gpu:
        always["communicators"] = sum(communicators(memory.layout) for memory in here.values())
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
        phases.append(MemoryPhase(GENERATE, {name: size for name, size in items.items() if size}, less))
    for role, memory in here.items():
        others = {other: ranks for other, ranks in here.items() if other != role}
        kept_here = kept | left_by(others)
        stay = [*_leave(others), *leave_earlier(others)]
        held_twice = always.get("engine weights", 0)
        advice = partial(
            _advice,
            memory,
            cache=bool(kept),
            weights=held_twice if engine.memory_saver and engine.precision is None else 0,
            stay=stay,
            on_gpu=on_gpu,
        )
        phases.append(
            MemoryPhase(
                f"infer of {role}",
                kept_here | in_turn[role] | _at_work(memory.inference[device]),
                advice("infer", memory.inference[device]),
            )
        )
        if memory.role.trained:
            gradients = {} if alone else {"gradients": memory.resident[device].gradients}
            at_work, staged = memory.update[device], memory.resident[device].staged
            working = _at_work(at_work) if at_work.peak >= staged else {"optimizer": staged}
            items = kept_here | in_turn[role] | gradients | working
            phases.append(MemoryPhase(f"update of {role}", items, advice("update", at_work)))
    stages = {
        role: (memory.layout.pp, (memory.stages[device],)) for role, memory in here.items() if memory.layout.pp > 1
    }
    return GpuMemory((), always, tuple(phases), tokens * engine.attention_dp, stages)


def rank_workspace(config: RolloutConfig, spec: ModelSpec, *, on_gpu: bool) -> int:
    """Predict what an engine takes on a rank next to weights and KV cache."""
    # These import torch, which the other half of a ledger does without.
    from engine3d.platform.cuda.cuda_platform import graph_batch_sizes
    from engine3d.rollout.scheduler.attention.cascade_attention import table_bytes
    from engine3d.rollout.scheduler.peer_collectives import PEER_MEMORY

    requests = config.most_requests
    workspace = engine_workspace(
        requests=requests * (1 + config.draft_tokens),
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


def _at_work(working: WorkingBytes) -> dict[str, int]:
    end = {"logits": working.logits} if working.logits >= working.layer else {"one layer": working.layer}
    return {name: size for name, size in ({"activations": working.activations} | end).items() if size}


def _advice(
    ranks: RoleMemory,
    call: str,
    working: WorkingBytes,
    *,
    cache: bool,
    weights: int,
    stay: Sequence[str],
    on_gpu: bool,
) -> str:
    """Settings with which a phase of training would need less, the cheapest first."""
    config, train = ranks.role.train, ranks.role.setting
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
    if ranks.role.trained and not config.optimizer.precision_aware:
        advice.append(f"{train}.optimizer.precision_aware=true")
    if ranks.role.trained and not config.optimizer.offload:
        advice.append(f"{train}.optimizer.offload=true")
    return ", ".join([*advice, f"more of tp, pp, cp and ep in {train}.layout, or more GPUs"])


def _cache_tokens(
    engine: RolloutConfig,
    serving: ServingBytes,
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
        memory.resident[device].dummy_gradients
        + (0 if memory.role.offload else memory.resident[device].weights)
        + memory.copies[device].quantised
        + memory.copies[device].merged
        for memory in here.values()
    )
    others = DRIVER_BYTES + CONTEXT_BYTES * (len(here) + 1) if device.kind == "cuda" else 0
    left = engine.mem_fraction_static * (size - taken - others) - (serving.weights - serving.shared) - serving.states
    capacity = max(0, int(left // serving.cache_of_a_token))
    return capacity if most is None else min(capacity, most)


def _leave(ranks: Mapping[str, RoleMemory]) -> list[str]:
    """The settings by which models would leave that now stay."""
    return [f"{role}.offload=true" for role, memory in ranks.items() if role != "actor" and not memory.role.offload]
