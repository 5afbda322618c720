"""Search for a trainer's layout: those that fit the memory of its GPUs, the fastest by the cost model first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from engine3d.dtypes import ITEMSIZES
from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.memory import (
    CopiedBytes,
    ResidentBytes,
    WorkingBytes,
    copied_by_rank,
    inference_peak,
    resident_by_rank,
    update_peak,
)
from engine3d.memory.overhead import device_overhead, model_overhead
from engine3d.models import ModelSpec
from engine3d.models.precision import Precision
from engine3d.training.config import TrainConfig
from engine3d.training.optimizer import ElementBytes, element_bytes
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.training import Batch, CostModel, UpdateCost, distinct_stages

USED_SHARE = 0.93
"""Share of a GPU's memory that may be planned: predictions are up to 7 % too low."""

_PADDING = 0.97
_MOST_CONTEXT_RANKS = 64
_MOST_VIRTUAL_STAGES = 8
_MOST_TOGETHER = 32 * 1024
"""Tokens of a micro-batch of several sequences."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a rank of a pipeline stage at the peak of an update, in bytes.

    Args:
        stage: its number.
        resident: weights, gradients and optimizer state.
        copies: of weights and tokens.
        working: activations, logits, the largest layer.
        overhead: of processes, libraries and communicators, the driver's not among them.
    """

    stage: int
    resident: ResidentBytes
    copies: CopiedBytes
    working: WorkingBytes
    overhead: int

    @property
    def staying(self) -> int:
        """Bytes between updates: gradients are released."""
        return self.resident.on_device - self.resident.gradients + self.copies.total + self.overhead

    @property
    def total(self) -> int:
        working = max(self.working.peak, self.resident.staged)
        return self.resident.on_device + self.copies.total + working + self.overhead


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that fits.

    Args:
        layout: of the trainer.
        config: with its recomputation and micro-batches.
        batch: sequences of an update, and of a micro-batch.
        cost: of an update.
        heaviest: the stage that takes the most memory.
    """

    layout: Layout
    config: TrainConfig
    batch: Batch
    cost: UpdateCost
    heaviest: StageMemory


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout with its settings and seconds, before its memory is known.

    Args:
        layout: of the trainer.
        config: with its recomputation.
        batch: sequences of an update, and of a micro-batch.
        passes: cost without the optimizer.
        optimizer: seconds of the optimizer and of sums of gradients.
    """

    layout: Layout
    config: TrainConfig
    batch: Batch
    passes: UpdateCost
    optimizer: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.passes.seconds + sum(self.optimizer.values())

    @property
    def cost(self) -> UpdateCost:
        return replace(self.passes, **self.optimizer)


class LayoutFront:
    """Layouts on some GPUs of which each is faster than all that are smaller.

    Memory is predicted as far as a limit needs it, and once.

    Args:
        search: that has the candidates.
        candidates: the fastest first.
    """

    def __init__(self, search: LayoutSearch, candidates: Sequence[_Candidate]) -> None:
        self._search = search
        self._candidates = iter(candidates)
        self._proposals: list[Proposal] = []
        self._smallest = math.inf
        self.least = math.inf
        """Bytes of the smallest candidate of those that were looked at, without padding of its buffers."""

    def fastest(self, limit: float) -> Proposal | None:
        """Return the fastest layout whose heaviest stage takes at most this many bytes; None if there is none.

        Args:
            limit: bytes, at most those of a GPU that has no other models.
        """
        for proposal in self._proposals:
            if proposal.heaviest.total <= limit:
                return proposal
        for candidate in self._candidates:
            layout, config, batch = candidate.layout, candidate.config, candidate.batch
            bound = self._search.least_memory(layout, config, batch)
            self.least = min(self.least, bound)
            if bound >= min(self._smallest, self._search.limit(0)):
                continue
            heaviest = self._search.heaviest(layout, config, batch)
            if heaviest.total < self._smallest:
                self._smallest = heaviest.total
                proposal = Proposal(layout, _with_tokens(config, batch), batch, candidate.cost, heaviest)
                self._proposals.append(proposal)
                if heaviest.total <= limit:
                    return proposal
        return None


def _with_tokens(config: TrainConfig, batch: Batch) -> TrainConfig:
    """Return settings whose micro-batches are those of a batch."""
    tokens = batch.tokens * batch.together
    if max(1, config.micro_batch_tokens // batch.tokens) == batch.together:
        return config
    return config.model_copy(update={"micro_batch_tokens": tokens})


class LayoutSearch:
    """Layouts of a model on some GPUs: Algorithm 2 of the HybridFlow paper (arXiv 2409.19256) for a model.

    Searched are tp within a node, cp, pp, vpp, ep, etp, recomputation, and the sequences of a micro-batch, all in
    powers of two. Not searched are `stages` and `recompute_layers`, which are at their defaults.

    Args:
        spec: the model.
        config: of the training, without layout.
        hardware: of every rank.
        longest: tokens of the longest sequence, which decides memory; those of the batch if None.
        accepts: refuses layouts and settings that may not be proposed, with a UserError.
        trained: the model is updated; else it makes forward passes.
        expert_tensor_parallel: etp is searched too.
        offloads: an offloaded optimizer is searched too.
        keeps_settings: recomputation and tokens of a micro-batch are those of the config.
        serves: engines have the model's weights.
        engine_precision: of these.
        gpus: the ranks are on GPUs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: TrainConfig,
        hardware: Hardware,
        *,
        longest: int | None = None,
        accepts: Callable[[Layout, TrainConfig], None] = lambda layout, config: None,
        trained: bool = True,
        expert_tensor_parallel: bool = False,
        offloads: bool = False,
        keeps_settings: bool = False,
        serves: bool = False,
        engine_precision: Precision | None = None,
        gpus: bool = True,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self._config = config
        self._longest = longest
        self._accepts = accepts
        self._trained = trained
        self._with_etp = expert_tensor_parallel
        self._keeps = keeps_settings
        self._serves = serves
        self._engine_precision = engine_precision
        self._gpus = gpus
        self._refusal: UserError | None = None
        self._misfit: UserError | None = None
        self._configs = self._searched_configs(offloads and trained and not keeps_settings)
        self._ranked: dict[tuple[int, Batch], list[_Candidate]] = {}
        self._residents: dict[tuple[Layout, int, bool], ResidentBytes] = {}
        self._copies: dict[tuple[Layout, int, int], CopiedBytes] = {}
        self._stages: dict[Layout, list[int]] = {}
        self.costs = CostModel(spec, hardware)

    def _searched_configs(self, offloads: bool) -> list[TrainConfig]:
        kinds = ("none", "selective", "full") if self._trained else ("none",)
        if self._keeps:
            kinds = (self._config.recompute,)
        optimizers = [self._config.optimizer]
        if offloads and not self._config.optimizer.offload:
            optimizers.append(self._config.optimizer.model_copy(update={"offload": True}))
        return [
            self._config.model_copy(update={"recompute": kind, "optimizer": optimizer})
            for optimizer in optimizers
            for kind in kinds
        ]

    def best(self, gpus: int, batch: Batch, beside: int = 0) -> Proposal:
        """Propose the fastest layout that fits.

        Args:
            gpus: ranks of the trainer.
            batch: sequences of an update.
            beside: bytes of each GPU that others have during an update.

        Raises:
            UserError: none fits into `USED_SHARE` of the memory.
        """
        front = self.front(gpus, batch)
        proposal = front.fastest(self.limit(beside))
        if proposal is None:
            raise UserError(self.refusal(front, gpus, batch, beside))
        return proposal

    def limit(self, beside: int) -> float:
        """Bytes of a GPU that a model may take next to others."""
        return self.hardware.memory * USED_SHARE - beside - device_overhead(on_gpu=self._gpus)

    def refusal(self, front: LayoutFront, gpus: int, batch: Batch, beside: int) -> str:
        """The line that says that no layout of a front fits."""
        refused = self._refusal or self._misfit
        needed = "none has a sequence for each rank" if refused is None else f"such as {refused}"
        if front.least < math.inf:
            needed = f"the least is {amount(front.least + beside + device_overhead(on_gpu=self._gpus), 1)}"
        return (
            f"{gpus} GPUs of {amount(self.hardware.memory, 1)}: no layout fits {batch.sequences:,} sequences of "
            f"{batch.tokens:,} tokens ({needed}); expected more or larger GPUs, or shorter sequences"
        )

    def front(self, gpus: int, batch: Batch, accepts: Callable[[Layout], bool] = lambda layout: True) -> LayoutFront:
        """Rank the layouts on some GPUs, the fastest first.

        Args:
            gpus: ranks of the trainer.
            batch: sequences of an update.
            accepts: layouts to keep.
        """
        key = (gpus, batch)
        if key not in self._ranked:
            candidates = self._costed(gpus, batch)
            self._ranked[key] = sorted(candidates, key=lambda candidate: candidate.seconds)
        return LayoutFront(self, [candidate for candidate in self._ranked[key] if accepts(candidate.layout)])

    def _costed(self, gpus: int, batch: Batch) -> Iterator[_Candidate]:
        """Yield candidates with their costs, of which those of the same kernels or optimizer are predicted once."""
        kernels: dict[tuple[Layout, int, bool], UpdateCost] = {}
        optimizers: dict[tuple[Layout, bool], dict[str, float]] = {}
        for layout, config, with_micro_batches in self._candidates(gpus, batch):
            of_kernels = (layout, with_micro_batches.together, config.recompute == "full")
            of_optimizer = (layout, config.optimizer.offload)
            if of_kernels not in kernels:
                kernels[of_kernels] = self.costs.passes(layout, config, with_micro_batches, trained=self._trained)
            if of_optimizer not in optimizers:
                optimizers[of_optimizer] = self.costs.optimizer(layout, config) if self._trained else {}
            yield _Candidate(layout, config, with_micro_batches, kernels[of_kernels], optimizers[of_optimizer])

    def heaviest(self, layout: Layout, config: TrainConfig, batch: Batch) -> StageMemory:
        """Predict the memory of the stage that takes the most."""
        limits = [(self._bound(layout, stage, config, batch), stage) for stage in self._distinct_stages(layout)]
        # Padding of buffers is a hundredth at most, so that a stage far below the heaviest is not the heaviest.
        most = max(limits)[0]
        stages = (self.memory(layout, stage, config, batch) for limit, stage in limits if limit > most * _PADDING)
        return max(stages, key=lambda memory: memory.total)

    def memory(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> StageMemory:
        """Predict the memory of a stage."""
        key = (layout, stage, config.optimizer.offload)
        if key not in self._residents:
            at = layout.coordinates(stage * layout.stage_size)
            self._residents[key] = resident_by_rank(
                self.spec, layout, at, config, trainable=self._trained, transformer_engine=self._gpus
            )
        working = self._working(layout, stage, config, batch)
        return StageMemory(
            stage,
            self._residents[key],
            self._copied(layout, stage, config, batch),
            working,
            model_overhead(layout, on_gpu=self._gpus),
        )

    def _copied(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> CopiedBytes:
        tokens = self._tokens(batch)
        key = (layout, stage, tokens)
        if key not in self._copies:
            self._copies[key] = copied_by_rank(
                self.spec,
                layout,
                layout.coordinates(stage * layout.stage_size),
                config,
                tokens=tokens,
                serves=self._serves,
                engine_precision=self._engine_precision,
                transformer_engine=self._gpus,
            )
        return self._copies[key]

    def _tokens(self, batch: Batch) -> int:
        """Tokens of the largest micro-batch."""
        return max(batch.tokens * batch.together, self._longest or 0)

    def _working(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> WorkingBytes:
        at, tokens = layout.coordinates(stage * layout.stage_size), self._tokens(batch)
        if not self._trained:
            return inference_peak(self.spec, layout, at, config, tokens=tokens)
        return update_peak(self.spec, layout, at, config, tokens=tokens, micro_batches=batch.micro_batches(layout))

    def least_memory(self, layout: Layout, config: TrainConfig, batch: Batch) -> float:
        """Count the bytes of the heaviest stage without padding of its buffers, in a hundredth of the time."""
        return max(self._bound(layout, stage, config, batch) for stage in self._distinct_stages(layout))

    def _distinct_stages(self, layout: Layout) -> list[int]:
        if layout not in self._stages:
            self._stages[layout] = distinct_stages(self.spec, layout)
        return self._stages[layout]

    def _bound(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> float:
        """Count the bytes of a stage without padding of its buffers."""
        of_element, copies = element_bytes(config), (layout.dp * layout.cp, layout.edp)
        if not self._trained:
            of_element = ElementBytes(0, 0, 0)
        on_device = of_element.master + (0 if config.optimizer.offload else of_element.moments)
        resident = sum(
            elements * (ITEMSIZES[config.dtype] + of_element.gradient + on_device / count)
            for elements, count in zip(self.costs.elements(layout, stage), copies, strict=True)
        )
        return resident + self._working(layout, stage, config, batch).peak + model_overhead(layout, on_gpu=self._gpus)

    def _candidates(self, gpus: int, batch: Batch) -> Iterator[tuple[Layout, TrainConfig, Batch]]:
        for layout in self._layouts(gpus):
            accepted = [config for config in self._configs if self._is_accepted(layout, config)]
            counts = _powers(max(1, _MOST_TOGETHER // batch.tokens))
            if self._keeps:
                share = -(-batch.sequences // layout.dp)
                counts = [max(1, min(share, self._config.micro_batch_tokens // batch.tokens))]
            for together in counts:
                if layout.dp * together <= batch.sequences or (self._keeps and layout.dp <= batch.sequences):
                    for config in accepted:
                        yield layout, config, Batch(batch.sequences, batch.tokens, together)

    def _is_accepted(self, layout: Layout, config: TrainConfig) -> bool:
        try:
            self._accepts(layout, config)
        except UserError as error:
            self._refusal = self._refusal or error
            return False
        return True

    def _layouts(self, gpus: int) -> Iterator[Layout]:
        experts = self.spec.sizes.experts
        for tp in _powers(min(gpus, self.hardware.gpus_per_node)):
            for cp in _powers(min(gpus // tp, _MOST_CONTEXT_RANKS)):
                for pp in _powers(min(gpus // (tp * cp), self.spec.sizes.layers)):
                    if gpus % (tp * cp * pp):
                        continue
                    size = gpus // pp
                    for ep in [ep for ep in _powers(min(size, experts) if experts else 1) if size % ep == 0]:
                        most = min(tp, size // ep) if self._with_etp and ep else 1
                        for etp, vpp in product(_powers(most), _powers(_MOST_VIRTUAL_STAGES if pp > 1 else 1)):
                            if size % (ep * etp):
                                continue
                            layout = Layout.of_world(gpus, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp)
                            if self._fits(layout):
                                yield layout

    def _fits(self, layout: Layout) -> bool:
        try:
            self.spec.check_layout(layout)
        except UserError as error:
            self._misfit = self._misfit or error
            return False
        return True


def _powers(most: int) -> list[int]:
    """List the powers of two up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]
