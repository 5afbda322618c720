"""Plan of a run: groups of roles on GPUs, layouts, engines, the seconds of a step and the memory of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.planning.search.engines import EngineChoice
from hybridflow.planning.search.layouts import Proposal
from hybridflow.planning.time.phases import PhaseCosts
from hybridflow.planning.time.step import StepSeconds

ROLLOUT = "rollout"


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
        latent: a model has multi-head latent attention.
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
    latent: bool = False

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
