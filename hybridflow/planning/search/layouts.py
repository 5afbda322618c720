"""Search for a trainer's layout: those that fit the memory of its GPUs, the fastest by the cost model first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from engine3d.dtypes import ITEMSIZES
from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.memory import ResidentBytes, WorkingBytes, inference_peak, resident_by_rank, update_peak
from engine3d.memory.overhead import CONTEXT_BYTES, DRIVER_BYTES, MODEL_BYTES, communicators
from engine3d.models import ModelSpec
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
        working: activations, logits, the largest layer.
        overhead: of processes, libraries and communicators, and of others on the GPU.
    """

    stage: int
    resident: ResidentBytes
    working: WorkingBytes
    overhead: int

    @property
    def staying(self) -> int:
        """Bytes between updates: gradients are released."""
        return self.resident.on_device - self.resident.gradients + self.overhead

    @property
    def total(self) -> int:
        return self.resident.on_device + max(self.working.peak, self.resident.staged) + self.overhead


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


class LayoutSearch:
    """Layouts of a model on some GPUs: Algorithm 2 of the HybridFlow paper (arXiv 2409.19256) for a model.

    Searched are tp within a node, cp, pp, vpp, ep, etp, recomputation, and the sequences of a micro-batch, all in
    powers of two. Not searched are `stages` and `recompute_layers`, which are at their defaults.

    Args:
        spec: the model.
        config: of the training, without layout.
        hardware: of every rank.
        beside: bytes of each GPU that others have during an update.
        longest: tokens of the longest sequence, which decides memory; those of the batch if None.
        accepts: layouts and settings that may be proposed.
        trained: the model is updated; else it makes forward passes.
        expert_tensor_parallel: etp is searched too.
        residents: cache of what ranks keep, of searches of the same model.
        keeps_settings: recomputation and tokens of a micro-batch are those of the config.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: TrainConfig,
        hardware: Hardware,
        beside: int = 0,
        *,
        longest: int | None = None,
        accepts: Callable[[Layout, TrainConfig], bool] = lambda layout, config: True,
        trained: bool = True,
        expert_tensor_parallel: bool = False,
        residents: dict[Any, ResidentBytes] | None = None,
        keeps_settings: bool = False,
    ) -> None:
        self.spec = spec
        self._config = config
        self.hardware = hardware
        self._beside = beside
        self._longest = longest
        self._accepts = accepts
        self._trained = trained
        self._with_etp = expert_tensor_parallel
        self._residents = {} if residents is None else residents
        self._keeps = keeps_settings
        self.costs = CostModel(spec, hardware)

    def best(self, gpus: int, batch: Batch, count: int = 1) -> list[Proposal]:
        """Propose layouts, the fastest first.

        Args:
            gpus: ranks of the trainer.
            batch: sequences of an update.
            count: most layouts.

        Raises:
            UserError: none fits into `USED_SHARE` of the memory.
        """
        predict = self.costs.update if self._trained else self.costs.forward
        candidates = [
            (predict(layout, config, with_micro_batches), number, layout, config, with_micro_batches)
            for number, (layout, config, with_micro_batches) in enumerate(self._candidates(gpus, batch))
        ]
        proposals: list[Proposal] = []
        least, limit = math.inf, self.hardware.memory * USED_SHARE
        for cost, _, layout, config, with_micro_batches in sorted(candidates, key=lambda one: (one[0].seconds, one[1])):
            bound = self._least_memory(layout, config, with_micro_batches)
            least = min(least, bound)
            if bound > limit or any(proposal.layout == layout for proposal in proposals):
                continue
            heaviest = self.heaviest(layout, config, with_micro_batches)
            if heaviest.total <= limit:
                proposals.append(Proposal(layout, config, with_micro_batches, cost, heaviest))
                if len(proposals) == count:
                    break
        if not proposals:
            needed = (
                f"the least is {amount(least, 1)}"
                if candidates
                else "no layout has a sequence for each rank and passes the checks of the settings"
            )
            raise UserError(
                f"{gpus} GPUs of {amount(self.hardware.memory, 1)}: no layout fits {batch.sequences:,} sequences of "
                f"{batch.tokens:,} tokens ({needed}); expected more or larger GPUs, or shorter sequences"
            )
        return proposals

    def heaviest(self, layout: Layout, config: TrainConfig, batch: Batch) -> StageMemory:
        """Predict the memory of the stage that takes the most."""
        limits = [(self._bound(layout, stage, config, batch), stage) for stage in distinct_stages(self.spec, layout)]
        # Padding of buffers is a hundredth at most, so that a stage far below the heaviest is not the heaviest.
        most = max(limits)[0]
        stages = (self.memory(layout, stage, config, batch) for limit, stage in limits if limit > most * _PADDING)
        return max(stages, key=lambda memory: memory.total)

    def memory(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> StageMemory:
        """Predict the memory of a stage."""
        key = (layout, stage, config.dtype, config.optimizer.model_dump_json())
        if key not in self._residents:
            at = layout.coordinates(stage * layout.stage_size)
            self._residents[key] = resident_by_rank(self.spec, layout, at, config, trainable=self._trained)
        resident = self._residents[key]
        return StageMemory(stage, resident, self._working(layout, stage, config, batch), self._overhead(layout))

    def _working(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> WorkingBytes:
        at, tokens = layout.coordinates(stage * layout.stage_size), batch.tokens * batch.together
        tokens = max(tokens, self._longest or 0)
        if not self._trained:
            return inference_peak(self.spec, layout, at, config, tokens=tokens)
        return update_peak(self.spec, layout, at, config, tokens=tokens, micro_batches=batch.micro_batches(layout))

    def _least_memory(self, layout: Layout, config: TrainConfig, batch: Batch) -> float:
        """Count the bytes of the heaviest stage without padding of its buffers, in a hundredth of the time."""
        return max(self._bound(layout, stage, config, batch) for stage in distinct_stages(self.spec, layout))

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
        return resident + self._working(layout, stage, config, batch).peak + self._overhead(layout)

    def _overhead(self, layout: Layout) -> int:
        """Count the bytes of processes, libraries and communicators, and of others."""
        return communicators(layout) + MODEL_BYTES + DRIVER_BYTES + CONTEXT_BYTES + self._beside

    def _candidates(self, gpus: int, batch: Batch) -> Iterator[tuple[Layout, TrainConfig, Batch]]:
        kinds = ("none", "selective", "full") if self._trained else ("none",)
        if self._keeps:
            kinds = (self._config.recompute,)
        configs = [self._config.model_copy(update={"recompute": kind}) for kind in kinds]
        for layout in self._layouts(gpus):
            accepted = [config for config in configs if self._accepts(layout, config)]
            counts = _powers(max(1, _MOST_TOGETHER // batch.tokens))
            if self._keeps:
                share = -(-batch.sequences // layout.dp)
                counts = [max(1, min(share, self._config.micro_batch_tokens // batch.tokens))]
            for together in counts:
                if layout.dp * together <= batch.sequences or (self._keeps and layout.dp <= batch.sequences):
                    for config in accepted:
                        yield layout, config, Batch(batch.sequences, batch.tokens, together)

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
        except UserError:
            return False
        return True


def _powers(most: int) -> list[int]:
    """List the powers of two up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]
