"""Placement of a run's roles on the GPUs of a cluster: Algorithm 1 of the HybridFlow paper (arXiv 2409.19256).

Candidates are the partitions of the roles into groups that share GPUs, with every allocation of GPUs to the groups in
steps of an eighth (within a node, of a GPU). Of each group every role takes its best layout by Algorithm 2 next to what
the others leave on its GPUs. A candidate is left out where its least possible time, all products at the rates of their
kernels and weights read once, is longer than the best that was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.memory import ResidentBytes
from engine3d.training.config import TrainConfig
from engine3d.training.flops import PASSES_OF_AN_UPDATE, sequence_flops
from hybridflow.planning.search.engines import EngineChoice, EngineSearch
from hybridflow.planning.search.layouts import LayoutSearch, Proposal
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.hardware import Profile
from hybridflow.planning.time.phases import PhaseCosts, RoleLayout, phase_costs
from hybridflow.planning.time.step import StepSeconds, step_seconds
from hybridflow.planning.time.training import Batch
from hybridflow.planning.time.workload import RoleWork, Workload

ROLLOUT = "rollout"
_LEAST_EFFICIENCY = 0.8
"""Highest share of the peak that any kernel class reaches: the bound of a candidate's time."""
_ROUNDS = 2
"""Times that the roles of a group choose their layouts, each time next to the others' last choices."""

Accepts = Callable[[str, Layout, TrainConfig], bool]


@dataclass(frozen=True)
class RoleGroup:
    """Roles that share GPUs.

    Args:
        roles: that take turns on them; "rollout" is the engines.
        first, gpus: of the cluster, counted over its nodes.
    """

    roles: tuple[str, ...]
    first: int
    gpus: int


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of a GPU at the peak of a phase.

    Args:
        phase: its name, with the role.
        group: roles of its GPUs.
        total: bytes.
    """

    phase: str
    group: tuple[str, ...]
    total: int


@dataclass(frozen=True)
class RunPlan:
    """Placement of a run with all layouts.

    Args:
        groups: of roles, with their GPUs.
        roles: proposal for each Megatron-Core model.
        engines: of the rollout; None without.
        costs: of the phases.
        step: seconds of a step.
        memory: peak of each phase.
        staleness: of the engines' weights, in updates.
        stream: rollouts are a stream.
        offloaded: roles that leave their GPUs between their turns.
    """

    groups: tuple[RoleGroup, ...]
    roles: Mapping[str, Proposal]
    engines: EngineChoice | None
    costs: PhaseCosts
    step: StepSeconds
    memory: tuple[PhaseMemory, ...]
    staleness: int
    stream: bool
    offloaded: frozenset[str] = frozenset()

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def kind(self) -> str:
        """Name of the placement: colocated, split, standalone or mixed."""
        if len(self.groups) == 1:
            return "colocated"
        alone = any(group.roles == (ROLLOUT,) for group in self.groups)
        if len(self.groups) == 2:
            return "standalone" if alone else "split"
        return "mixed"

    def group_of(self, role: str) -> RoleGroup:
        return next(group for group in self.groups if role in group.roles)


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Args:
        base: features of engines that stay as they are.
        staleness: of engines on their own devices.
        stream: their rollouts are a stream.
        shared: colocated engines may share the actor's weights.
        release: they release their weights while models compute.
        attention_dp: data parallelism of attention may be proposed.
        alone: engines have GPUs of their own.
        engines: the only engines that may be proposed; any if None.
        keeps_settings: recomputation, micro-batches and the optimizer's place stay as they are.
        accepts: layouts and settings of a role that may be proposed.
    """

    base: EngineShape
    staleness: int = 0
    stream: bool = False
    shared: bool = True
    release: bool = False
    attention_dp: bool = True
    alone: bool = False
    engines: EngineShape | None = None
    keeps_settings: bool = False
    accepts: Accepts = lambda role, layout, config: True


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
        self.refusals: list[str] = []
        self._hardware = profile.hardware
        self._layouts: dict[tuple[str, int, int, int | None], list[Proposal] | str] = {}
        self._residents: dict[str, dict[Any, ResidentBytes]] = {}
        self._engines: dict[tuple[int, int, Layout | None, int | None], EngineChoice | str] = {}

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
        candidates = sorted(
            ((self._bound(groups), number, groups) for number, groups in enumerate(self._candidates(gpus))),
            key=lambda candidate: candidate[:2],
        )
        for bound, _, groups in candidates:
            if not exhaustive and len(plans) >= count and bound > plans[count - 1].step.step:
                break
            plan = self._planned(groups)
            if plan is not None:
                plans = sorted([*plans, plan], key=lambda plan: plan.step.step)
        if not plans:
            raise UserError(self.refusals[0] if self.refusals else f"{gpus} GPUs: no placement of the roles fits them")
        return plans[:count]

    @property
    def _names(self) -> list[str]:
        return [role.role for role in self.work.roles] + ([ROLLOUT] if self.work.generates else [])

    def _candidates(self, gpus: int) -> Iterator[tuple[RoleGroup, ...]]:
        alone = self.settings.staleness > 0 or self.settings.stream or self.settings.alone
        for partition in partitions(self._names):
            if alone and not any(roles == (ROLLOUT,) for roles in partition):
                continue
            for sizes in allocations(gpus, len(partition), self._hardware.gpus_per_node):
                starts = itertools.accumulate(sizes, initial=0)
                yield tuple(
                    RoleGroup(roles, first, size) for roles, first, size in zip(partition, starts, sizes, strict=False)
                )

    def _bound(self, groups: Sequence[RoleGroup]) -> float:
        """Compute the least seconds in which a candidate may make a step."""
        rate = self._hardware.flops * _LEAST_EFFICIENCY
        training, rollout = 0.0, 0.0
        for group in groups:
            seconds = 0.0
            for work in self.work.roles:
                if work.role in group.roles:
                    of_pass = float(sequence_flops(work.spec, self.work.tokens)) * self.work.sequences
                    passes = work.passes + (PASSES_OF_AN_UPDATE * self.work.epochs if work.trained else 0)
                    seconds += of_pass * passes / (group.gpus * rate)
            training = max(training, seconds)
            if ROLLOUT in group.roles:
                of_pass = float(sequence_flops(self.work.actor.spec, self.work.tokens)) * self.work.sequences
                rollout = of_pass / self.work.samples / (group.gpus * rate)
        return max(training, rollout) if self.settings.staleness else training + rollout

    def on_groups(self, groups: tuple[RoleGroup, ...]) -> RunPlan | None:
        """Plan the layouts of a placement that is given; None where one does not fit, see `refusals`."""
        return self._planned(groups)

    def _planned(self, groups: tuple[RoleGroup, ...]) -> RunPlan | None:
        """Choose every role's layout in its group; None where one does not fit."""
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
        return self._costed(groups, roles, engines, tuple(memory), offloaded)

    def _costed(
        self,
        groups: tuple[RoleGroup, ...],
        roles: dict[str, Proposal],
        engines: EngineChoice | None,
        memory: tuple[PhaseMemory, ...],
        offloaded: frozenset[str],
    ) -> RunPlan:
        colocated = any({"actor", ROLLOUT} <= {*group.roles} for group in groups)
        alone = any(group.roles == (ROLLOUT,) for group in groups)
        layouts = {role: RoleLayout(proposal.layout, proposal.config) for role, proposal in roles.items()}
        costs = phase_costs(
            self.work,
            self._hardware,
            layouts,
            engines.shape if engines is not None else None,
            cache_tokens=engines.cache_tokens if engines is not None else 1e15,
            colocated=colocated,
            shared=self.settings.shared,
        )
        staleness = self.settings.staleness if alone else 0
        stream = self.settings.stream and alone
        sets = [frozenset(group.roles) for group in groups]
        step = step_seconds(costs.seconds, sets, staleness=staleness, stream=stream)
        return RunPlan(groups, roles, engines, costs, step, memory, staleness, stream, offloaded)

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
                proposals = self._proposals(work, group.gpus, beside, alike)
                if proposals is None:
                    return None
                chosen[work.role] = proposals[0]
            if serves:
                actor = chosen["actor"].layout if "actor" in chosen and self.settings.shared else None
                alike = size if actor is not None else None
                engines = self._engine(group.gpus, self._left(chosen, offloaded, ""), actor, alike)
                if engines is None:
                    return None
        phases = self._memory(group, chosen, engines, offloaded)
        if max(phase.total for phase in phases) > self._hardware.memory:
            return None
        return chosen, engines, phases, offloaded & frozenset(group.roles)

    def _memory(
        self,
        group: RoleGroup,
        chosen: Mapping[str, Proposal],
        engines: EngineChoice | None,
        offloaded: frozenset[str],
    ) -> list[PhaseMemory]:
        phases = []
        if engines is not None:
            taken = engines.weights + engines.cache + engines.workspace + self._left(chosen, offloaded, "")
            phases.append(PhaseMemory(ROLLOUT, group.roles, taken))
        for work in self.work.roles:
            if work.role in chosen:
                name = f"update of {work.role}" if work.trained else f"infer of {work.role}"
                others = self._left(chosen, offloaded, work.role) + self._engine_left(engines)
                phases.append(PhaseMemory(name, group.roles, chosen[work.role].heaviest.total + others))
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
        """Bytes that an engine leaves on a GPU while models compute: its KV cache is released."""
        if engines is None:
            return 0
        kept = 0 if self.settings.release else engines.weights
        return engines.workspace + kept

    def _proposals(self, work: RoleWork, gpus: int, beside: int, alike: int | None) -> list[Proposal] | None:
        key = (work.role, gpus, -(-beside // _GRAIN) * _GRAIN, alike)
        if key not in self._layouts:
            self._layouts[key] = self._search(work, gpus, key[2], alike)
        result = self._layouts[key]
        if isinstance(result, str):
            if result not in self.refusals:
                self.refusals.append(result)
            return None
        return result

    def _search(self, work: RoleWork, gpus: int, beside: int, alike: int | None) -> list[Proposal] | str:
        def accepts(layout: Layout, config: TrainConfig) -> bool:
            if alike is not None and (layout.ep, layout.etp, layout.pp) != (alike, 1, 1):
                return False
            return self.settings.accepts(work.role, layout, config)

        batch = Batch(max(1, self.work.sequences // self.work.mini_batches), self.work.tokens)
        kept = work.config
        optimizers = [kept.optimizer]
        if work.trained and not kept.optimizer.offload and not self.settings.keeps_settings:
            optimizers.append(kept.optimizer.model_copy(update={"offload": True}))
        proposals: list[Proposal] = []
        refusal = ""
        for optimizer in optimizers:
            search = LayoutSearch(
                work.spec,
                kept.model_copy(update={"optimizer": optimizer}),
                self._hardware,
                beside,
                longest=self.work.longest_sequence,
                accepts=accepts,
                trained=work.trained,
                expert_tensor_parallel=True,
                residents=self._residents.setdefault(work.role, {}),
                keeps_settings=self.settings.keeps_settings,
            )
            try:
                proposals += search.best(gpus, batch)
            except UserError as error:
                refusal = f"{work.role}: {error}"
        if not proposals:
            return refusal
        return sorted(proposals, key=lambda proposal: proposal.cost.seconds)

    def _engine(self, gpus: int, beside: int, actor: Layout | None, alike: int | None) -> EngineChoice | None:
        key = (gpus, -(-beside // _GRAIN) * _GRAIN, actor, alike)
        if key not in self._engines:
            search = EngineSearch(
                self.work,
                self._hardware,
                self.settings.base,
                attention_dp=self.settings.attention_dp,
                beside=actor,
                expert_parallel=alike,
                only=self.settings.engines,
            )
            try:
                self._engines[key] = search.best(gpus, key[1], stream=self.settings.stream)
            except UserError as error:
                self._engines[key] = str(error)
        result = self._engines[key]
        if isinstance(result, str):
            if result not in self.refusals:
                self.refusals.append(result)
            return None
        return result


_GRAIN = 10**9
"""Bytes to which what others leave is rounded up, so that searches are shared."""


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
