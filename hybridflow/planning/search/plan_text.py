"""A plan as text: the ranked table, where each second comes from, and changes by what-if."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from hybridflow.planning.search.run_plan import ROLLOUT, RunPlan
from hybridflow.planning.time.hardware import Profile
from hybridflow.planning.time.training import UpdateCost
from hybridflow.planning.time.workload import Workload

_UNMEASURED = 0.1
"""Widening of an interval for each feature of a plan whose cost was not measured."""
_PHASES = ("rollout", "scoring", "update", "transfer", "driver")


def interval(plan: RunPlan, profile: Profile) -> dict[str, float]:
    """Relative half-width of the interval of each phase, and of the step as "step".

    Those of the profile, wider by a tenth for each feature whose cost was not measured with it.
    """
    wider = _UNMEASURED * len(unmeasured(plan, profile))
    widths = {phase: profile.interval.get(phase, 0.5) + wider for phase in _PHASES}
    seconds = plan.step.phases
    total = sum(seconds.values())
    widths["step"] = sum(widths[phase] * seconds[phase] for phase in _PHASES) / total if total else wider
    return widths


def unmeasured(plan: RunPlan, profile: Profile) -> list[str]:
    """List features of a plan whose cost was not measured on the profile's hardware."""
    features: dict[str, None] = {}
    for proposal in plan.roles.values():
        layout = proposal.layout
        for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"):
            if getattr(layout, name) > 1 and name not in profile.measured:
                features[name] = None
        if layout.world_size > profile.hardware.gpus_per_node:
            features["network"] = None
    if plan.latent:
        features["latent attention"] = None
    if plan.engines is not None and plan.engines.shape.fp8:
        features["fp8"] = None
    if plan.costs.transfer is not None and plan.costs.transfer.network:
        features["network"] = None
    return [name for name in features if name not in profile.measured]


def table(plans: Sequence[RunPlan], work: Workload, profile: Profile, *, count: int) -> list[str]:
    """The ranked table: a block of lines for each plan, the fastest first.

    Args:
        plans: one more than are shown, if there is one: the next of the last that is shown.
        work: of a step.
        profile: of the GPUs.
        count: plans to show.
    """
    lines = []
    for rank, plan in enumerate(plans[:count], start=1):
        widths = interval(plan, profile)
        step, width = plan.step.step, widths["step"]
        tokens = work.sequences * work.tokens / step / plan.gpus
        mfu = work.flops / (plan.gpus * profile.hardware.flops * step)
        stale = f", staleness {plan.staleness}{' in a stream' * plan.stream}" if plan.staleness else ""
        lines.append(
            f"{rank}. {plan.kind}{stale}: {step:.1f} s a step ({step * (1 - width):.1f} to {step * (1 + width):.1f}), "
            f"{tokens:,.0f} tokens/s a GPU, MFU {mfu:.3f}"
        )
        lines += [f"   {line}" for line in _block(plan, widths)]
        if rank < len(plans):
            after = plans[rank]
            lines.append(f"   next: {after.kind}, {after.step.step - step:+.1f} s ({_difference(plan, after)})")
    return lines


def _block(plan: RunPlan, widths: dict[str, float]) -> Iterator[str]:
    for group in plan.groups:
        last = group.first + group.gpus - 1
        yield f"GPUs {group.first}-{last}: {', '.join(group.roles)}"
    for role, proposal in plan.roles.items():
        config = proposal.config
        settings = [f"micro-batches of {proposal.batch.tokens * proposal.batch.together:,} tokens"]
        settings.append(f"recompute {config.recompute}")
        settings += ["optimizer offloaded"] * (config.optimizer.offload) + ["offloaded"] * (role in plan.offloaded)
        yield f"{role}: {proposal.layout}; {', '.join(settings)}"
    if plan.engines is not None:
        shape = plan.engines.shape
        yield (
            f"rollout: {shape}; {shape.requests:,} requests at once, KV cache of {plan.engines.cache_tokens:,} tokens "
            "each"
        )
    yield (
        "seconds: "
        + ", ".join(
            f"{phase} {seconds:.1f} +- {seconds * widths[phase]:.1f}"
            for phase, seconds in plan.step.phases.items()
            if seconds > 0
        )
        + (f"; {plan.step.hidden:.1f} of them covered by others" if plan.step.hidden > 0.05 else "")
    )
    yield "memory: " + ", ".join(f"{phase.phase} {phase.total / 1e9:.1f} GB" for phase in plan.memory)
    if plan.costs.transfer is not None:
        transfer = plan.costs.transfer
        link = "between nodes" if transfer.network else "within nodes"
        yield f"weights: {transfer.nbytes / 1e9:.1f} GB {link}, {transfer.seconds:.2f} s"
    yield f"bottleneck: {plan.step.bottleneck}"


def _difference(plan: RunPlan, other: RunPlan) -> str:
    changes = ((phase, other.step.phases[phase] - seconds) for phase, seconds in plan.step.phases.items())
    return ", ".join(f"{phase} {change:+.1f}" for phase, change in changes if abs(change) >= 0.05) or "no phase differs"


def explanation(plan: RunPlan, profile: Profile) -> list[str]:
    """Lines that say where each second of a plan comes from, and which rates were not measured."""
    lines = ["where the seconds come from:"]
    for name, costs in (("update", plan.costs.update), ("scoring", plan.costs.scoring)):
        for role, cost in costs.items():
            lines.append(f"  {name} of {role}: {cost.seconds:.2f} s")
            lines += [f"    {kind:<10} {seconds:8.2f}  {_MEANINGS[kind]}" for kind, seconds in _kinds(cost)]
    if (rollout := plan.costs.rollout) is not None:
        lines.append(f"  {ROLLOUT}: {rollout.seconds:.2f} s in {rollout.steps:,} decoding steps")
        kinds = ("prefill", "weights", "cache", "exchange", "launches")
        lines += [f"    {kind:<10} {getattr(rollout, kind):8.2f}  {_MEANINGS[f'rollout {kind}']}" for kind in kinds]
        lines.append(f"    of these {rollout.tail:.2f} s with fewer than half of the requests")
    if (transfer := plan.costs.transfer) is not None:
        lines.append(
            f"  transfer: {transfer.seconds:.2f} s, {transfer.busiest / 1e9:.2f} GB of the busiest rank at "
            f"{_transfer_rate(transfer.network, profile):.0f} GB/s"
        )
    lines.append(f"  driver: {plan.costs.driver:.2f} s between the phases, for each sample")
    features = unmeasured(plan, profile)
    if features:
        lines.append(f"  not measured on {profile.name}, each a tenth wider: {', '.join(features)}")
    assumed = [name for name, origin in profile.origins.items() if origin.startswith("assumed")]
    if assumed:
        lines.append(f"  assumed rates of the profile: {', '.join(assumed)}")
    return lines


def _transfer_rate(network: bool, profile: Profile) -> float:
    hardware = profile.hardware
    return (hardware.network_rate if network else hardware.node_rate) * hardware.transfer_share / 1e9


def _kinds(cost: UpdateCost) -> Iterator[tuple[str, float]]:
    for field in fields(cost):
        if (seconds := getattr(cost, field.name)) >= 0.005:
            yield field.name, seconds


def change_line(name: str, before: RunPlan, after: RunPlan) -> str:
    """The line of a what-if: seconds of a step and of each phase, with and without."""
    moved = ", ".join(
        f"{phase} {after.step.phases[phase] - seconds:+.2f}" for phase, seconds in before.step.phases.items()
    )
    share = after.step.step / before.step.step - 1
    return f"{name}: {after.kind}, {after.step.step:.1f} s a step ({share:+.0%}); {moved} s"


_MEANINGS = {
    "linear": "matrix multiplications of attention, dense MLPs and the output layer",
    "experts": "grouped GEMMs of experts",
    "attention": "scores and sums over values",
    "memory": "kernels that the memory bounds, sums of gradients among them",
    "launches": "launches beyond the kernels' time",
    "tensor": "exchanges of tensor parallelism",
    "expert": "exchanges of experts' tokens",
    "context": "keys and values that arrive late",
    "pipeline": "hidden states between stages",
    "bubble": "waits for other stages",
    "gradients": "sums of gradients, gathers of weights",
    "optimizer": "Adam, with its state's way from host memory",
    "call": "calls, batches, metrics",
    "rollout prefill": "reading prompts, starting requests",
    "rollout weights": "reading weights, computing with them, sampling",
    "rollout cache": "reading keys and values",
    "rollout exchange": "exchanges of an engine's ranks",
    "rollout launches": "launches and the scheduler",
}
