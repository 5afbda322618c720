"""Search for a trainer's layout: those that fit the memory of its GPUs, the fastest by the cost model first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.memory.overhead import device_overhead
from engine3d.models import ModelSpec
from engine3d.models.precision import Precision
from engine3d.training.config import TrainConfig
from hybridflow.planning.search.layout_bounds import LayoutBounds
from hybridflow.planning.search.layout_memory import LayoutMemory, StageMemory
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.training import Batch, CostModel, UpdateCost

_MOST_CONTEXT_RANKS = 64
_MOST_VIRTUAL_STAGES = 8
_MOST_TOGETHER = 32 * 1024
"""Tokens of a micro-batch of several sequences."""


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
        memory: of the model.
        candidates: the fastest first.
    """

    def __init__(self, memory: LayoutMemory, candidates: Iterator[_Candidate]) -> None:
        self._memory = memory
        self._candidates = candidates
        self._proposals: list[Proposal] = []
        self._smallest = math.inf
        self.least = math.inf
        """Bytes of the smallest candidate of those that were looked at, without padding of its buffers."""
        self.smallest: Layout | None = None
        """Layout of that candidate."""

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
            bound = self._memory.least(layout, config, batch)
            if bound < self.least:
                self.least, self.smallest = bound, layout
            if bound >= min(self._smallest, self._memory.limit(0)):
                continue
            heaviest = self._memory.heaviest(layout, config, batch)
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
        self._accepts = accepts
        self._trained = trained
        self._with_etp = expert_tensor_parallel
        self._keeps = keeps_settings
        self._gpus = gpus
        self._misfit: UserError | None = None
        self._first_refusals: dict[int, UserError | None] = {}
        self._configs = self._searched_configs(offloads and trained and not keeps_settings)
        self._layouts_of: dict[tuple[int, Batch], list[tuple[Layout, float]]] = {}
        self._candidates_of: dict[tuple[Layout, Batch], list[_Candidate]] = {}
        self.costs = CostModel(spec, hardware)
        self.memory = LayoutMemory(
            spec,
            hardware,
            self.costs,
            longest=longest,
            trained=trained,
            serves=serves,
            engine_precision=engine_precision,
            gpus=gpus,
        )
        self._bounds = LayoutBounds(self.costs, self._configs[0], trained=trained)

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
        proposal = front.fastest(self.memory.limit(beside))
        if proposal is None:
            raise UserError(self.refusal(front, gpus, batch, beside))
        return proposal

    def refusal(self, front: LayoutFront, gpus: int, batch: Batch, beside: int) -> str:
        """The line that says that no layout of a front fits."""
        if front.least < math.inf:
            least = front.least + beside + device_overhead(on_gpu=self._gpus)
            needed = f"the least is {amount(least, 1)}, with {front.smallest}"
        else:
            refused = self._first_refusal(gpus) or self._misfit
            needed = "none has a sequence for each rank" if refused is None else f"such as {refused}"
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
        return LayoutFront(self.memory, self._ranked(gpus, batch, accepts))

    def _ranked(self, gpus: int, batch: Batch, accepts: Callable[[Layout], bool]) -> Iterator[_Candidate]:
        """Yield candidates, the fastest first. Those of a layout are costed once its bound is the least left."""
        key = (gpus, batch)
        if key not in self._layouts_of:
            self._layouts_of[key] = list(self._bounded(gpus, batch))
        # Of equal seconds the layout that comes first, then its first candidate.
        heap: list[tuple[float, int, int, Layout | _Candidate]] = [
            (bound, number, -1, layout)
            for number, (layout, bound) in enumerate(self._layouts_of[key])
            if accepts(layout)
        ]
        heapq.heapify(heap)
        while heap:
            _, number, _, item = heapq.heappop(heap)
            if isinstance(item, _Candidate):
                yield item
            else:
                for index, candidate in enumerate(self._costed(item, batch)):
                    heapq.heappush(heap, (candidate.seconds, number, index, candidate))

    def _bounded(self, gpus: int, batch: Batch) -> Iterator[tuple[Layout, float]]:
        """Yield the layouts that have candidates, with the least seconds of these."""
        for layout in self._layouts(gpus):
            counts = self._counts(layout, batch)
            if counts and any(self._refusal(layout, config) is None for config in self._configs):
                smallest = replace(batch, together=counts[0])
                yield layout, self._bounds.least_seconds(layout, smallest, counts[-1])

    def _costed(self, layout: Layout, batch: Batch) -> list[_Candidate]:
        """Predict the costs of a layout's candidates, those of the same kernels or optimizer once."""
        if (layout, batch) not in self._candidates_of:
            kernels: dict[tuple[int, bool], UpdateCost] = {}
            optimizers: dict[bool, dict[str, float]] = {}
            candidates = []
            for config, of_together in self._accepted(layout, batch):
                of_kernels, offload = (of_together.together, config.recompute == "full"), config.optimizer.offload
                if of_kernels not in kernels:
                    kernels[of_kernels] = self.costs.passes(layout, config, of_together, trained=self._trained)
                if offload not in optimizers:
                    optimizers[offload] = self.costs.optimizer(layout, config) if self._trained else {}
                candidates.append(_Candidate(layout, config, of_together, kernels[of_kernels], optimizers[offload]))
            self._candidates_of[layout, batch] = candidates
        return self._candidates_of[layout, batch]

    def _candidates(self, gpus: int, batch: Batch) -> Iterator[tuple[Layout, TrainConfig, Batch]]:
        for layout in self._layouts(gpus):
            for config, of_together in self._accepted(layout, batch):
                yield layout, config, of_together

    def _accepted(self, layout: Layout, batch: Batch) -> Iterator[tuple[TrainConfig, Batch]]:
        """Yield the settings of a layout that may be proposed, with the sequences of a micro-batch."""
        configs = [config for config in self._configs if self._refusal(layout, config) is None]
        for together, config in product(self._counts(layout, batch), configs):
            yield config, replace(batch, together=together)

    def _counts(self, layout: Layout, batch: Batch) -> list[int]:
        """List the sequences that a micro-batch may have, the fewest first."""
        share = -(-batch.sequences // layout.dp)
        if self._keeps:
            count = max(1, min(share, self._config.micro_batch_tokens // batch.tokens))
            return [count] if layout.dp <= batch.sequences else []
        most = max(1, _MOST_TOGETHER // batch.tokens)
        return [count for count in _powers(most) if layout.dp * count <= batch.sequences]

    def _refusal(self, layout: Layout, config: TrainConfig) -> UserError | None:
        """The reason for which a layout may not be proposed with some settings; None if it may."""
        try:
            self._accepts(layout, config)
        except UserError as error:
            return error
        return None

    def _first_refusal(self, gpus: int) -> UserError | None:
        if gpus not in self._first_refusals:
            refusals = (self._refusal(layout, config) for layout in self._layouts(gpus) for config in self._configs)
            self._first_refusals[gpus] = next(filter(None, refusals), None)
        return self._first_refusals[gpus]

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
