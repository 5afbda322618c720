"""Metrics of an update that are exactly the same however its tokens were split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine3d.collectives import all_reduce
from engine3d.startup.lazy_imports import dist, torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Statistics:
    """One micro-batch's contribution to the metrics on one rank. Every tensor is a detached float64 scalar.

    Three kinds, because they reduce differently:
    - `sums`: addends of a value of one mini-batch, such as the loss under the `sequence_weights`; they add up.
    - `means`: pairs of numerator and denominator, each of which adds up; their quotient is the metric.
    - `maxima`: the largest value counts.

    Merge the micro-batches of a rank, then `all_reduce` over the ranks that hold different tokens (the data- and
    context-parallel group of the last pipeline stage); the mini-batches of a step may be merged too, before `values`.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def merge(shards: Iterable[Statistics]) -> Statistics:
        """Merge statistics. A name that only some of them have counts from those."""
        sums: dict[str, Tensor] = {}
        means: dict[str, tuple[Tensor, Tensor]] = {}
        maxima: dict[str, Tensor] = {}
        for shard in shards:
            for name, value in shard.sums.items():
                sums[name] = sums[name] + value if name in sums else value
            for name, (numerator, denominator) in shard.means.items():
                if name in means:
                    numerator, denominator = means[name][0] + numerator, means[name][1] + denominator
                means[name] = (numerator, denominator)
            for name, value in shard.maxima.items():
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Statistics(sums, means, maxima)

    def cpu(self) -> Statistics:
        """Return the same on the CPU."""
        return Statistics(
            {name: value.cpu() for name, value in self.sums.items()},
            {name: (numerator.cpu(), denominator.cpu()) for name, (numerator, denominator) in self.means.items()},
            {name: value.cpu() for name, value in self.maxima.items()},
        )

    def all_reduce(self, group: ProcessGroup | None = None) -> Statistics:
        """Compute the statistics over all ranks of `group`, on each of them. All must hold the same names in the same
        order.
        """
        added = [*self.sums.values(), *(term for pair in self.means.values() for term in pair)]
        total, highest = list(added), list(self.maxima.values())
        if added:
            stacked = torch.stack(added)
            all_reduce(stacked, dist.ReduceOp.SUM, group)
            total = list(stacked.unbind())
        if highest:
            stacked = torch.stack(highest)
            all_reduce(stacked, dist.ReduceOp.MAX, group)
            highest = list(stacked.unbind())
        pairs = total[len(self.sums) :]
        return Statistics(
            dict(zip(self.sums, total, strict=False)),
            dict(zip(self.means, zip(pairs[::2], pairs[1::2], strict=True), strict=True)),
            dict(zip(self.maxima, highest, strict=True)),
        )

    def values(self, mini_batches: int = 1) -> dict[str, float]:
        """Return the metrics by name. `mini_batches` says how many were merged: sums become their mean over those.

        A mean over nothing is left out.
        """
        metrics = {name: value.item() / mini_batches for name, value in self.sums.items()}
        for name, (numerator, denominator) in self.means.items():
            if denominator.item():
                metrics[name] = numerator.item() / denominator.item()
        return metrics | {name: value.item() for name, value in self.maxima.items() if value.item() != -torch.inf}


def total(column: Tensor) -> Tensor:
    """Compute the sum of a column as a detached float64 scalar."""
    return column.detach().sum(dtype=torch.float64)
