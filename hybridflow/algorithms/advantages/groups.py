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
    """Membership of a batch's samples in prompt groups, with group statistics in float64.

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
        """Return the groups of samples with these (B,) int64 ids."""
        groups, member_of = group_ids.unique(return_inverse=True)
        return Groups(member_of, len(groups))

    def sums(self, values: Tensor) -> Tensor:
        """Return the (G,) float64 sum of (B,) values over each group."""
        # In float64 the sum of equal float32 rewards is exact, and so is their mean. An error of rounding, divided by
        # the smallest epsilon where a standard deviation is 0, would be an advantage.
        values = values.to(torch.float64)
        return values.new_zeros(self.count).index_add(0, self.member_of, values)

    def sizes(self) -> Tensor:
        """Return the (G,) float64 number of samples of each group, at least 1."""
        return self.sums(torch.ones_like(self.member_of))

    def means(self, values: Tensor) -> Tensor:
        """Return the (G,) float64 mean of (B,) values over each group."""
        return self.sums(values) / self.sizes()

    def differ(self, values: Tensor) -> Tensor:
        """Return (G,) bool: True for a group with two different (B,) values."""
        values = values.to(torch.float64)
        low, high = (
            values.new_zeros(self.count).scatter_reduce(0, self.member_of, values, reduce, include_self=False)
            for reduce in ("amin", "amax")
        )
        return low < high

    def of_samples(self, values: Tensor) -> Tensor:
        """Return (B,) values: for each sample the value of its group among (G,)."""
        return values[self.member_of]


def groups_of(where: str, rewards: Tensor, group_ids: Tensor) -> Groups:
    """Return the groups of samples with one reward each.

    Raises ValueError for a reward that is not finite, naming its row, and for columns that are not (B,) both; `where`
    names the function in errors.
    """
    check_rows(where, rows=len(rewards), rewards=rewards, group_ids=group_ids)
    check_finite("advantages", "reward", rewards)
    return Groups.of(group_ids)
