"""Placement of a run's roles on the GPUs of a cluster: Algorithm 1 of the HybridFlow paper (arXiv 2409.19256).

Candidates are the partitions of the roles into groups that share GPUs, with every allocation of GPUs to the groups in
steps of an eighth (within a node, of a GPU). Of each group every role takes its best layout by Algorithm 2 next to what
the others leave on its GPUs. A candidate is left out where its least possible time, each role with the fastest layout
that fits its GPUs by itself, is longer than the best plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine3d.errors import UserError
from engine3d.memory.overhead import CONTEXT_BYTES, device_overhead
from hybridflow.planning.search.engines import EngineChoice
from hybridflow.planning.search.layouts import Proposal
from hybridflow.planning.search.role_choices import RoleChoices, SearchSettings
from hybridflow.planning.search.run_plan import ROLLOUT, PhaseMemory, RoleGroup, RunPlan
from hybridflow.planning.time.hardware import Profile
from hybridflow.planning.time.phases import PhaseCosts
from hybridflow.planning.time.step import PhaseSeconds, StepSeconds, step_seconds
from hybridflow.planning.time.transfer import transfer_cost
from hybridflow.planning.time.workload import Workload


def partitions(names: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every partition of names into sets, in a fixed order."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for partition in partitions(rest):
        yield [(first,), *partition]
        for index, block in enumerate(partition):
            yield [*partition[:index], (first, *block), *partition[index + 1 :]]


def allocations(gpus: int, groups: int, gpus_per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to give all GPUs to groups: in single GPUs within a node, else in eighths that are whole nodes.

    A group of fewer GPUs than the steps would have none is not among them.
    """
    step = 1 if gpus <= gpus_per_node else max(gpus_per_node, gpus // 8 // gpus_per_node * gpus_per_node)
    units = gpus // step
    for cuts in itertools.combinations(range(1, units), groups - 1):
        edges = (0, *cuts, units)
        sizes = [(after - before) * step for before, after in itertools.pairwise(edges)]
        sizes[-1] += gpus - units * step
        yield tuple(sizes)


_ROUNDING = 1.01
"""Margin of the memory that engines may take: pages of a KV cache are rounded."""
_ROUNDS = 2
"""Times that the roles of a group choose their layouts, each time next to the others' last choices."""


class PlacementSearch:
    """Placements of a run.

    Args:
        work: of a step.
        profile: of every GPU.
        settings: of the search.
    """

    def __init__(self, work: Workload, profile: Profile, settings: SearchSettings) -> None:
        self.work = work
        self.profile = profile
        self.settings = settings
        self._hardware = profile.hardware
        self._driver = device_overhead(on_gpu=settings.gpus)
        self._choices = RoleChoices(work, profile.hardware, settings)

    @property
    def refusals(self) -> list[str]:
        """Lines that say what did not fit, those of the most GPUs first."""
        return self._choices.refusals

    def best(self, gpus: int, count: int = 5, *, exhaustive: bool = False) -> list[RunPlan]:
        """Return the fastest plans, the fastest first.

        Args:
            gpus: of the cluster.
            count: most plans.
            exhaustive: no candidate is left out by its bound.

        Raises:
            UserError: none fits; names what the nearest candidate lacks.
        """
        plans: list[RunPlan] = []
        bounded = ((self._bound(groups), groups) for groups in self._candidates(gpus))
        candidates = sorted(
            ((bound, number, groups) for number, (bound, groups) in enumerate(bounded) if bound is not None),
            key=lambda candidate: candidate[:2],
        )
        for bound, _, groups in candidates:
            if not exhaustive and len(plans) >= count and bound > plans[count - 1].step.step:
                break
            plan = self.on_groups(groups)
            if plan is not None:
                plans = sorted([*plans, plan], key=lambda plan: plan.step.step)
        if not plans:
            raise UserError(self.refusals[0] if self.refusals else f"{gpus} GPUs: no placement of the roles fits them")
        return plans[:count]

    @property
    def _names(self) -> list[str]:
        return [role.role for role in self.work.roles] + ([ROLLOUT] if self.work.generates else [])

    def _candidates(self, gpus: int) -> Iterator[tuple[RoleGroup, ...]]:
        alone = self.work.staleness > 0 or self.settings.stream or self.settings.alone
        for partition in partitions(self._names):
            if alone and not any(roles == (ROLLOUT,) for roles in partition):
                continue
            for sizes in allocations(gpus, len(partition), self._hardware.gpus_per_node):
                starts = itertools.accumulate(sizes, initial=0)
                yield tuple(
                    RoleGroup(roles, first, size) for roles, first, size in zip(partition, starts, sizes, strict=False)
                )

    def _bound(self, groups: Sequence[RoleGroup]) -> float | None:
        """Compute the least seconds in which a candidate may make a step; None where a role does not fit its GPUs."""
        rollout, scoring, update = 0.0, {}, {}
        for group in groups:
            for role in group.roles:
                least = self._choices.least_seconds(role, group.gpus)
                if least is None:
                    return None
                rollout, scoring[role], update[role] = max(rollout, least[0]), least[1], least[2]
        driver = self._hardware.sample_s * self.work.sequences
        transfer = self._hardware.transfer_s if self.work.generates else 0.0
        return self._step(groups, PhaseSeconds(rollout, rollout, scoring, update, transfer, driver)).step

    def on_groups(self, groups: tuple[RoleGroup, ...]) -> RunPlan | None:
        """Plan the layouts of a placement; None where one does not fit, see `refusals`."""
        shared = [group for group in groups if {"actor", ROLLOUT} <= {*group.roles}]
        plans = [self._with_sharing(groups, size) for size in self._shared_sizes(shared[0].gpus if shared else 1)]
        fitting = [plan for plan in plans if plan is not None]
        return min(fitting, key=lambda plan: plan.step.step) if fitting else None

    def _shared_sizes(self, gpus: int) -> list[int | None]:
        """List the expert-parallel sizes that actor and engines may have in common to share weights; None for any."""
        sizes: list[int | None] = [None]
        if not self.settings.shared or self.settings.release or not self.work.actor.spec.sizes.experts:
            return sizes
        size = 2
        while size <= min(gpus, self._hardware.gpus_per_node):
            sizes.append(size)
            size *= 2
        return sizes

    def _with_sharing(self, groups: tuple[RoleGroup, ...], size: int | None) -> RunPlan | None:
        roles: dict[str, Proposal] = {}
        engines: EngineChoice | None = None
        memory: list[PhaseMemory] = []
        offloaded: frozenset[str] = frozenset()
        for group in groups:
            fitted = self._group(group, frozenset(), size)
            if fitted is None and (may := frozenset(group.roles) - {"actor", ROLLOUT}):
                fitted = self._group(group, may, size)
            if fitted is None:
                return None
            chosen, of_group, phases, left = fitted
            roles |= chosen
            engines = of_group or engines
            memory += phases
            offloaded |= left
        costs = self._costs(groups, roles, engines)
        step = self._step(groups, costs.seconds)
        alone = _engines_are_alone(groups)
        staleness, stream = self.work.staleness * alone, self.settings.stream and alone
        latent = any(work.spec.sizes.latent is not None for work in self.work.roles)
        return RunPlan(groups, roles, engines, costs, step, tuple(memory), staleness, stream, offloaded, latent)

    def _step(self, groups: Sequence[RoleGroup], seconds: PhaseSeconds) -> StepSeconds:
        alone = _engines_are_alone(groups)
        return step_seconds(
            seconds,
            [frozenset(group.roles) for group in groups],
            staleness=self.work.staleness * alone,
            stream=self.settings.stream and alone,
        )

    def _costs(
        self, groups: Sequence[RoleGroup], roles: Mapping[str, Proposal], engines: EngineChoice | None
    ) -> PhaseCosts:
        """Predict the costs of all phases, as `phase_costs`, with those of each layout once."""
        works, cost = self.work.roles, self._choices.cost
        transfer = None
        if engines is not None:
            transfer = transfer_cost(
                self.work.actor.spec,
                self._hardware,
                roles[self.work.actor.role].layout,
                engines.shape,
                colocated=any({"actor", ROLLOUT} <= {*group.roles} for group in groups),
                shared=self.settings.shared,
            )
        return PhaseCosts(
            rollout=engines.cost if engines is not None else None,
            stream=engines.stream if engines is not None else 0.0,
            scoring={work.role: cost(work, roles[work.role], update=False) for work in works if work.passes},
            update={work.role: cost(work, roles[work.role], update=True) for work in works if work.trained},
            transfer=transfer,
            driver=self._hardware.sample_s * self.work.sequences,
        )

    def _group(
        self, group: RoleGroup, offloaded: frozenset[str], size: int | None
    ) -> tuple[dict[str, Proposal], EngineChoice | None, list[PhaseMemory], frozenset[str]] | None:
        """Choose the layouts of a group's roles, each next to what the others leave; None where one does not fit."""
        works = [work for work in self.work.roles if work.role in group.roles]
        chosen: dict[str, Proposal] = {}
        engines: EngineChoice | None = None
        serves = ROLLOUT in group.roles
        for _ in range(_ROUNDS if len(group.roles) > 1 else 1):
            for work in works:
                beside = self._left(chosen, offloaded, work.role) + (self._engine_left(engines) if serves else 0)
                alike = size if serves and work.role == "actor" else None
                proposal = self._choices.layout(work, group.gpus, beside, alike)
                if proposal is None:
                    return None
                chosen[work.role] = proposal
            if serves:
                actor = chosen["actor"].layout if "actor" in chosen and self.settings.shared else None
                alike = size if actor is not None else None
                engines = self._choices.engines(group.gpus, self._left(chosen, offloaded, ""), actor, alike)
                if engines is None:
                    return None
        if engines is not None:
            engines = replace(engines, memory_share=self._memory_share(chosen, engines, offloaded))
        phases = self._memory(group, chosen, engines, offloaded)
        if max(phase.total for phase in phases) > self._hardware.memory:
            return None
        return chosen, engines, phases, offloaded & frozenset(group.roles)

    def _memory_share(self, chosen: Mapping[str, Proposal], engines: EngineChoice, offloaded: frozenset[str]) -> float:
        """Compute the share of the memory that models leave when engines start, of which weights and cache are part."""
        taken = self._driver + CONTEXT_BYTES * (len(chosen) + 1)
        for role, proposal in chosen.items():
            resident, copies = proposal.heaviest.resident, proposal.heaviest.copies
            taken += resident.dummy_gradients + resident.weights * (role not in offloaded)
            taken += copies.quantised + copies.merged
        share = (engines.weights + engines.cache) / max(1, self._hardware.memory - taken)
        return min(0.99, math.ceil(100 * share * _ROUNDING) / 100)

    def _memory(
        self,
        group: RoleGroup,
        chosen: Mapping[str, Proposal],
        engines: EngineChoice | None,
        offloaded: frozenset[str],
    ) -> list[PhaseMemory]:
        phases = []
        if engines is not None:
            taken = engines.weights + engines.cache + engines.workspace + engines.reading
            others = self._left(chosen, offloaded, "")
            phases.append(PhaseMemory(ROLLOUT, group.roles, taken + others + self._driver))
        for work in self.work.roles:
            if work.role in chosen:
                name = f"update of {work.role}" if work.trained else f"infer of {work.role}"
                others = self._left(chosen, offloaded, work.role) + self._engine_left(engines)
                phases.append(PhaseMemory(name, group.roles, chosen[work.role].heaviest.total + others + self._driver))
        return phases

    def _left(self, chosen: Mapping[str, Proposal], offloaded: frozenset[str], but: str) -> int:
        """Bytes that models leave on a GPU between their turns."""
        return sum(
            proposal.heaviest.staying
            - (proposal.heaviest.resident.on_device - proposal.heaviest.resident.gradients) * (role in offloaded)
            for role, proposal in chosen.items()
            if role != but
        )

    def _engine_left(self, engines: EngineChoice | None) -> int:
        """Bytes that an engine leaves on a device while models compute: on GPUs its KV cache is released."""
        if engines is None:
            return 0
        kept = 0 if self.settings.release else engines.weights
        return engines.workspace + kept + (0 if self.settings.gpus else engines.cache)


def _engines_are_alone(groups: Sequence[RoleGroup]) -> bool:
    return any(group.roles == (ROLLOUT,) for group in groups)
