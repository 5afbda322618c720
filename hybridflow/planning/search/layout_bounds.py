"""Least seconds of a layout with any micro-batches, recomputation and optimizer: bounds by which layouts are ranked."""

from __future__ import annotations

from dataclasses import replace

from engine3d.layout import Layout
from engine3d.training.config import TrainConfig
from hybridflow.planning.time.training import Batch, CostModel, UpdateCost

_ROUNDING = 1 - 1e-9
"""Factor of a bound, whose sums may be rounded otherwise than those of a prediction."""


class LayoutBounds:
    """Bounds of a model's layouts.

    Args:
        costs: of the model.
        config: of its training, with the least seconds: without recomputation and an offloaded optimizer.
        trained: the model is updated; else it makes forward passes.
    """

    def __init__(self, costs: CostModel, config: TrainConfig, *, trained: bool) -> None:
        self._costs = costs
        self._config = config
        self._trained = trained
        self._micro_batches: dict[tuple[int, ...], UpdateCost] = {}

    def least_seconds(self, layout: Layout, batch: Batch, most: int) -> float:
        """Bound the seconds of an update, or of forward passes, from below.

        A sequence takes the least time in the largest micro-batch, in which most sequences share launches, messages and
        sums of gradients. A bubble is as long as a micro-batch, and the least in the smallest. Virtual stages have at
        least pp micro-batches: where these have all sequences, larger ones take longer.

        Args:
            layout: of the ranks.
            batch: sequences of an update, and of the smallest micro-batch.
            most: sequences of the largest, a power of two times those of the smallest.
        """
        share = -(-batch.sequences // layout.dp)
        while layout.vpp > 1 and most // 2 >= max(batch.together, layout.cp) and share <= most // 2 * layout.pp:
            most //= 2
        largest = replace(batch, together=most)
        least = largest.fill(layout) * self._seconds(layout, largest)
        if layout.pp > 1:
            # A larger micro-batch may have complete sequences on each rank, whose keys and values are not sent.
            smallest = self._seconds(layout, batch) - self._micro_batch(layout, batch).context
            least = max(least, layout.micro_batch_group * smallest) + (layout.pp - 1) / layout.vpp * smallest
        after = sum(self._costs.optimizer(layout, self._config).values()) if self._trained else 0.0
        return (least + self._costs.call(trained=self._trained) + after) * _ROUNDING

    def _seconds(self, layout: Layout, batch: Batch) -> float:
        sending = self._costs.sending(layout, self._config, batch, trained=self._trained)
        return self._micro_batch(layout, batch).seconds + sending

    def _micro_batch(self, layout: Layout, batch: Batch) -> UpdateCost:
        """Predict the cost of a micro-batch, once for all numbers of ranks."""
        sizes = (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp)
        key = (*sizes, batch.tokens, batch.together)
        if key not in self._micro_batches:
            self._micro_batches[key] = self._costs.micro_batch(layout, self._config, batch, trained=self._trained)
        return self._micro_batches[key]
