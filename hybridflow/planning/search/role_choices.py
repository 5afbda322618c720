"""Layouts and engines of the roles of a run on any number of GPUs, each searched once: Algorithm 2 for each role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.rollout.config import RolloutConfig
from engine3d.training.config import TrainConfig
from engine3d.training.flops import sequence_flops
from hybridflow.planning.search.engines import EngineChoice, EngineSearch
from hybridflow.planning.search.layouts import LayoutFront, LayoutSearch, Proposal
from hybridflow.planning.search.run_plan import ROLLOUT
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.phases import scoring_cost, update_cost
from hybridflow.planning.time.training import Batch, UpdateCost
from hybridflow.planning.time.workload import RoleWork, Workload

Accepts = Callable[[str, Layout, TrainConfig], None]
"""Raises a UserError for a layout and settings of a role that may not be proposed."""

AcceptsEngines = Callable[[EngineShape], None]
"""Raises a UserError for engines that may not be proposed."""

_GRAIN = 10**9
"""Bytes to which what others leave is rounded up, so that searches of engines are shared."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Args:
        base: features of engines that stay as they are.
        stream: their rollouts are a stream.
        shared: colocated engines may share the actor's weights.
        release: they release their weights while models compute.
        attention_dp: data parallelism of attention may be proposed.
        alone: engines have GPUs of their own.
        engines: the only engines that may be proposed; any if None.
        keeps_settings: recomputation, micro-batches and the optimizer's place stay as they are.
        accepts: refuses layouts and settings of a role that may not be proposed.
        engine: settings of engines that no search changes.
        gpus: the devices are GPUs.
        accepts_engines: refuses engines that may not be proposed.
    """

    base: EngineShape
    stream: bool = False
    shared: bool = True
    release: bool = False
    attention_dp: bool = True
    alone: bool = False
    engines: EngineShape | None = None
    keeps_settings: bool = False
    accepts: Accepts = lambda role, layout, config: None
    engine: RolloutConfig = field(default_factory=RolloutConfig)
    gpus: bool = True
    accepts_engines: AcceptsEngines = lambda shape: None


class RoleChoices:
    """Choices of each role, by the GPUs that it has and the bytes of them that others leave to it.

    Args:
        work: of a step.
        hardware: of every GPU.
        settings: of the search.
    """

    def __init__(self, work: Workload, hardware: Hardware, settings: SearchSettings) -> None:
        self.work = work
        self._refusals: dict[str, int] = {}
        self._hardware = hardware
        self._settings = settings
        self._searches: dict[tuple[str, Hardware], LayoutSearch] = {}
        self._fronts: dict[tuple[str, int, int | None], LayoutFront] = {}
        self._engines: dict[tuple[int, int, Layout | None, int | None], EngineChoice | str] = {}
        self._costs: dict[tuple[str, bool, Layout, str, int, bool], UpdateCost] = {}
        self._least_rollouts: dict[int, float | None] = {}

    @property
    def refusals(self) -> list[str]:
        """Lines that say what did not fit, those of the most GPUs first."""
        return sorted(self._refusals, key=lambda line: -self._refusals[line])

    def _search(self, work: RoleWork, gpus: int) -> LayoutSearch:
        """The layouts of a role: one search for any number of GPUs. On a CPU more ranks than cores have other rates."""
        hardware = self._hardware.for_ranks(gpus)
        key = (work.role, hardware)
        if key not in self._searches:
            self._searches[key] = self._new_search(work, hardware)
        return self._searches[key]

    def _new_search(self, work: RoleWork, hardware: Hardware) -> LayoutSearch:
        return LayoutSearch(
            work.spec,
            work.config,
            hardware,
            longest=self.work.longest_sequence,
            accepts=lambda layout, config: self._settings.accepts(work.role, layout, config),
            trained=work.trained,
            expert_tensor_parallel=True,
            offloads=self._settings.gpus,
            keeps_settings=self._settings.keeps_settings,
            serves=work.role == "actor" and self.work.generates,
            engine_precision="fp8" if self._settings.base.fp8 else None,
            gpus=self._settings.gpus,
        )

    def _batch(self, work: RoleWork) -> Batch:
        updates = self.work.mini_batches if work.trained else 1
        return Batch(max(1, self.work.sequences // updates), self.work.tokens)

    def layout(self, work: RoleWork, gpus: int, beside: int, expert_parallel: int | None = None) -> Proposal | None:
        """Return the fastest layout of a role; None where none fits, see `refusals`.

        Args:
            work: of the role.
            gpus: of the role.
            beside: bytes of each that others have.
            expert_parallel: ep of the layout, without etp and pp; any layout if None.
        """
        key = (work.role, gpus, expert_parallel)
        search, batch = self._search(work, gpus), self._batch(work)
        if key not in self._fronts:
            alike = (expert_parallel, 1, 1)
            self._fronts[key] = search.front(
                gpus,
                batch,
                lambda layout: expert_parallel is None or (layout.ep, layout.etp, layout.pp) == alike,
            )
        proposal = self._fronts[key].fastest(search.memory.limit(beside))
        if proposal is None:
            line = f"{work.role}: {search.refusal(self._fronts[key], gpus, batch, beside)}"
            self._refusals.setdefault(line, gpus)
        return proposal

    def engines(self, gpus: int, beside: int, actor: Layout | None, expert_parallel: int | None) -> EngineChoice | None:
        """Return the fastest engines; None where none fits, see `refusals`.

        Args:
            gpus: of all engines.
            beside: bytes of each that others have.
            actor: layout whose weights they may share.
            expert_parallel: tp and ep of the engines; any if None.
        """
        key = (gpus, -(-beside // _GRAIN) * _GRAIN, actor, expert_parallel)
        if key not in self._engines:
            search = EngineSearch(
                self.work,
                self._hardware,
                self._settings.base,
                attention_dp=self._settings.attention_dp,
                beside=actor,
                expert_parallel=expert_parallel,
                only=self._settings.engines,
                engine=self._settings.engine,
                gpus=self._settings.gpus,
                accepts=self._settings.accepts_engines,
            )
            try:
                self._engines[key] = search.best(gpus, key[1], stream=self._settings.stream)
            except UserError as error:
                self._engines[key] = str(error)
        result = self._engines[key]
        if isinstance(result, str):
            self._refusals.setdefault(result, gpus)
            return None
        return result

    def cost(self, work: RoleWork, proposal: Proposal, *, update: bool) -> UpdateCost:
        """Predict the cost of a step's updates of a role, or of its scoring passes."""
        config = proposal.config
        key = (
            work.role,
            update,
            proposal.layout,
            config.recompute,
            config.micro_batch_tokens,
            config.optimizer.offload,
        )
        if key not in self._costs:
            predict = update_cost if update else scoring_cost
            self._costs[key] = predict(self.work, work, self._hardware, proposal.layout, config)
        return self._costs[key]

    def least_seconds(self, role: str, gpus: int) -> tuple[float, float, float] | None:
        """Return the least seconds in which a role has its work done on some GPUs; None where nothing fits.

        Returns:
            Seconds of a rollout, of scoring and of updates.
        """
        if role == ROLLOUT:
            if gpus not in self._least_rollouts:
                self._least_rollouts[gpus] = self._least_rollout(gpus)
            rollout = self._least_rollouts[gpus]
            return None if rollout is None else (rollout, 0.0, 0.0)
        work = next(work for work in self.work.roles if work.role == role)
        proposal = self.layout(work, gpus, 0)
        if proposal is None:
            return None
        if not work.trained:
            return 0.0, self.cost(work, proposal, update=False).seconds, 0.0
        rate = gpus * self._hardware.highest_rate
        scoring = float(sequence_flops(work.spec, self.work.tokens)) * self.work.sequences * work.passes / rate
        return 0.0, scoring, self.cost(work, proposal, update=True).seconds

    def _least_rollout(self, gpus: int) -> float | None:
        search = EngineSearch(
            self.work,
            self._hardware,
            self._settings.base,
            attention_dp=self._settings.attention_dp,
            only=self._settings.engines,
            accepts=self._settings.accepts_engines,
        )
        seconds = search.least_seconds(gpus, stream=self._settings.stream)
        if seconds is None:
            self._refusals.setdefault(search.refusal(gpus), gpus)
        return seconds
