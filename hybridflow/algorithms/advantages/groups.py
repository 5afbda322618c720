"""Sums and means over the samples of each prompt: what every baseline of a group is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_finite, check_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """Which samples of a batch are of one prompt, and figures of them, in float64.

    A group is exactly the samples of the batch that have its id, in whatever order and number they are there: samples
    that were filtered, failed or came late are no part of it, and nothing assumes that it has the size it was drawn in.

    Args:
        member_of: (B,) int64: the group of each sample, from 0 to `count` - 1.
        count: of the groups, G.
    """

    member_of: Tensor
    count: int

    @staticmethod
    def of(group_ids: Tensor) -> Groups:
        """The groups of samples with these (B,) int64 ids."""
        groups, member_of = group_ids.unique(return_inverse=True)
        return Groups(member_of, len(groups))

    def sums(self, figures: Tensor) -> Tensor:
        """(G,) float64: the sum of (B,) figures over each group."""
        # In float64 the sum of equal float32 rewards is exact, and so is their mean. An error of rounding, divided by
        # the smallest epsilon where a standard deviation is 0, would be an advantage.
        figures = figures.to(torch.float64)
        return figures.new_zeros(self.count).index_add(0, self.member_of, figures)

    def sizes(self) -> Tensor:
        """(G,) float64: the number of samples of each group, at least 1."""
        return self.sums(torch.ones_like(self.member_of))

    def means(self, figures: Tensor) -> Tensor:
        """(G,) float64: the mean of (B,) figures over each group."""
        return self.sums(figures) / self.sizes()

    def differ(self, figures: Tensor) -> Tensor:
        """(G,) bool: whether a group has two different ones of (B,) figures."""
        figures = figures.to(torch.float64)
        low, high = (
            figures.new_zeros(self.count).scatter_reduce(0, self.member_of, figures, reduce, include_self=False)
            for reduce in ("amin", "amax")
        )
        return low < high

    def of_samples(self, figures: Tensor) -> Tensor:
        """(B,): for each sample, the figure of its group among (G,)."""
        return figures[self.member_of]


def groups_of(where: str, rewards: Tensor, group_ids: Tensor) -> Groups:
    """The groups of samples with one reward each.

    Raises ValueError for a reward that is not finite, naming its row, and for columns that are not (B,) both; `where`
    says which function asks.
    """
    check_rows(where, rows=len(rewards), rewards=rewards, group_ids=group_ids)
    check_finite("advantages", "reward", rewards)
    return Groups.of(group_ids)
