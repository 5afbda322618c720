"""Memory of a model's ranks on a layout: the heaviest pipeline stage, which decides whether a layout fits."""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.dtypes import ITEMSIZES
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
from hybridflow.planning.time.training import Batch, CostModel

USED_SHARE = 0.93
"""Share of a GPU's memory that may be planned: predictions are up to 7 % too low."""

_PADDING = 0.97


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


class LayoutMemory:
    """Memory of a model on layouts, of which each part is predicted once.

    Args:
        spec: the model.
        hardware: of every rank.
        costs: of the model.
        longest: tokens of the longest sequence; those of the batch if None.
        trained: the model is updated; else it makes forward passes.
        serves: engines have the model's weights.
        engine_precision: of these.
        gpus: the ranks are on GPUs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        costs: CostModel,
        *,
        longest: int | None,
        trained: bool,
        serves: bool,
        engine_precision: Precision | None,
        gpus: bool,
    ) -> None:
        self._spec = spec
        self._hardware = hardware
        self._costs = costs
        self._longest = longest
        self._trained = trained
        self._serves = serves
        self._engine_precision = engine_precision
        self._gpus = gpus
        self._residents: dict[tuple[Layout, int, bool], ResidentBytes] = {}
        self._copies: dict[tuple[Layout, int, int], CopiedBytes] = {}
        self._activations: dict[tuple[int | str, ...], WorkingBytes] = {}

    def limit(self, beside: int) -> float:
        """Bytes of a GPU that a model may take next to others."""
        return self._hardware.memory * USED_SHARE - beside - device_overhead(on_gpu=self._gpus)

    def heaviest(self, layout: Layout, config: TrainConfig, batch: Batch) -> StageMemory:
        """Predict the memory of the stage that takes the most."""
        limits = [(self._bound(layout, stage, config, batch), stage) for stage in self._distinct_stages(layout)]
        # Padding of buffers is a hundredth at most, so that a stage far below the heaviest is not the heaviest.
        most = max(limits)[0]
        stages = (self.stage(layout, stage, config, batch) for limit, stage in limits if limit > most * _PADDING)
        return max(stages, key=lambda memory: memory.total)

    def stage(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> StageMemory:
        """Predict the memory of a stage."""
        key = (layout, stage, config.optimizer.offload)
        if key not in self._residents:
            at = layout.coordinates(stage * layout.stage_size)
            self._residents[key] = resident_by_rank(
                self._spec, layout, at, config, trainable=self._trained, transformer_engine=self._gpus
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
                self._spec,
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
        """Predict the activations of a rank, once for all numbers of ranks and for both places of the optimizer."""
        # No more micro-batches are in flight, however many an update has.
        most = layout.passes_ahead(stage) + layout.virtual_stages
        tokens, micro_batches = self._tokens(batch), min(most, batch.micro_batches(layout))
        sizes = (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp)
        key = (*sizes, stage, config.recompute, tokens, micro_batches)
        if key not in self._activations:
            at = layout.coordinates(stage * layout.stage_size)
            self._activations[key] = (
                update_peak(self._spec, layout, at, config, tokens=tokens, micro_batches=micro_batches)
                if self._trained
                else inference_peak(self._spec, layout, at, config, tokens=tokens)
            )
        return self._activations[key]

    def least(self, layout: Layout, config: TrainConfig, batch: Batch) -> float:
        """Count the bytes of the heaviest stage without padding of its buffers, in a hundredth of the time."""
        return max(self._bound(layout, stage, config, batch) for stage in self._distinct_stages(layout))

    def _distinct_stages(self, layout: Layout) -> list[int]:
        return [sums.stage for sums in self._costs.stages(layout)]

    def _bound(self, layout: Layout, stage: int, config: TrainConfig, batch: Batch) -> float:
        """Count the bytes of a stage without padding of its buffers."""
        of_element, copies = element_bytes(config), (layout.dp * layout.cp, layout.edp)
        if not self._trained:
            of_element = ElementBytes(0, 0, 0)
        on_device = of_element.master + (0 if config.optimizer.offload else of_element.moments)
        resident = sum(
            elements * (ITEMSIZES[config.dtype] + of_element.gradient + on_device / count)
            for elements, count in zip(self._costs.elements(layout, stage), copies, strict=True)
        )
        return resident + self._working(layout, stage, config, batch).peak + model_overhead(layout, on_gpu=self._gpus)
