"""Seconds of every phase of a step on given layouts and engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine3d.layout import Layout
from engine3d.training.config import TrainConfig
from hybridflow.planning.time.generation import EngineShape, GenerationModel, RolloutCost
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.step import PhaseSeconds
from hybridflow.planning.time.training import Batch, CostModel, UpdateCost
from hybridflow.planning.time.transfer import TransferCost, transfer_cost
from hybridflow.planning.time.workload import RoleWork, Workload


@dataclass(frozen=True)
class RoleLayout:
    """Layout of a model's ranks and its settings there."""

    layout: Layout
    config: TrainConfig


@dataclass(frozen=True)
class PhaseCosts:
    """Costs of a step's phases.

    Args:
        rollout: of the engines; None without.
        stream: seconds of a rollout without its tail.
        scoring, update: by role.
        transfer: of the weights; None without engines.
        driver: seconds between the phases.
    """

    rollout: RolloutCost | None
    stream: float
    scoring: Mapping[str, UpdateCost]
    update: Mapping[str, UpdateCost]
    transfer: TransferCost | None
    driver: float

    @property
    def seconds(self) -> PhaseSeconds:
        return PhaseSeconds(
            rollout=self.rollout.seconds if self.rollout is not None else 0.0,
            stream=self.stream,
            scoring={role: cost.seconds for role, cost in self.scoring.items()},
            update={role: cost.seconds for role, cost in self.update.items()},
            transfer=self.transfer.seconds if self.transfer is not None else 0.0,
            driver=self.driver,
        )


def update_batch(work: Workload, layout: Layout, config: TrainConfig) -> Batch:
    """Sequences of an update of a mini-batch, with as many in a micro-batch as its tokens hold."""
    sequences = max(1, work.sequences // work.mini_batches)
    share = -(-sequences // layout.dp)
    return Batch(sequences, work.tokens, max(1, min(config.micro_batch_tokens // work.tokens, share)))


def update_cost(work: Workload, role: RoleWork, hardware: Hardware, layout: Layout, config: TrainConfig) -> UpdateCost:
    """Predict the cost of all updates of a step."""
    costs = CostModel(role.spec, hardware.for_ranks(layout.world_size))
    cost = costs.update(layout, config, update_batch(work, layout, config))
    return cost.scaled(work.mini_batches * work.epochs)


def scoring_cost(work: Workload, role: RoleWork, hardware: Hardware, layout: Layout, config: TrainConfig) -> UpdateCost:
    """Predict the cost of the forward passes over all samples of a step."""
    share = -(-work.sequences // layout.dp)
    batch = Batch(work.sequences, work.tokens, max(1, min(config.micro_batch_tokens // work.tokens, share)))
    costs = CostModel(role.spec, hardware.for_ranks(layout.world_size))
    return costs.forward(layout, config, batch).scaled(role.passes)


def rollout_costs(
    work: Workload, hardware: Hardware, engines: EngineShape, cache_tokens: float
) -> tuple[RolloutCost, float]:
    """Predict the cost of a rollout, and its seconds in a stream, where all slots are taken at all times."""
    hardware = hardware.for_ranks(engines.ranks)
    model = GenerationModel(work.actor.spec, hardware)
    cost = model.rollout(engines, work.prompts, work.samples, work.prompt, work.lengths, cache_tokens)
    of_engine = -(-work.prompts // engines.engines) * work.samples
    running = max(
        1.0, min(engines.requests, of_engine, cache_tokens // max(1.0, work.prompt / work.samples + work.response))
    )
    # A request that runs at some moment has made half of its tokens; long ones are seen more often.
    seen = sum(length**2 for length in work.lengths) / sum(work.lengths) / 2
    again = 0.0
    if engines.recomputes:
        again = running * (model.prompt_s(engines, work.prompt + seen) + hardware.decode_start_s)
    if len(work.lengths) == 1:
        return cost, cost.seconds + again
    tokens = running * (work.prompt + seen)
    shared = running * work.prompt * (1 - 1 / work.samples)
    step = sum(model.step(engines, running, tokens, shared).values())
    return cost, cost.prefill + of_engine * work.response / running * step + again


def phase_costs(
    work: Workload,
    hardware: Hardware,
    roles: Mapping[str, RoleLayout],
    engines: EngineShape | None,
    *,
    cache_tokens: float = 1e15,
    colocated: bool = False,
    shared: bool = True,
) -> PhaseCosts:
    """Predict the costs of all phases.

    Args:
        work: of a step.
        hardware: of every rank that has a core or a GPU to itself.
        roles: layout of each Megatron-Core model.
        engines: that generate; None without.
        cache_tokens: that the KV cache of each engine holds.
        colocated: the engines are on the actor's GPUs.
        shared: they may share its weights there.
    """
    scoring = {
        role.role: scoring_cost(work, role, hardware, roles[role.role].layout, roles[role.role].config)
        for role in work.roles
        if role.passes
    }
    update = {
        role.role: update_cost(work, role, hardware, roles[role.role].layout, roles[role.role].config)
        for role in work.roles
        if role.trained
    }
    rollout, stream, transfer = None, 0.0, None
    if engines is not None:
        rollout, stream = rollout_costs(work, hardware, engines, cache_tokens)
        layout = roles[work.actor.role].layout
        transfer = transfer_cost(work.actor.spec, hardware, layout, engines, colocated=colocated, shared=shared)
    return PhaseCosts(rollout, stream, scoring, update, transfer, hardware.sample_s * work.sequences)
