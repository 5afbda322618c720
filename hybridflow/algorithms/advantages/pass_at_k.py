"""Pass@k training: advantages of the reward that a set of k responses has where one of them is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.group_relative import STD_EPSILON
from hybridflow.algorithms.advantages.groups import Groups
from hybridflow.algorithms.checks import check_mask, check_rows

if TYPE_CHECKING:
    from torch import Tensor


def pass_at_k_advantages(right: Tensor, group_ids: Tensor, k: int) -> tuple[Tensor, float | None]:
    """Compute the advantages of right and of wrong responses, over all sets of k responses of a group.

        rho   = 1 - C(n - c, k) / C(n, k)             the share of sets that have a right response
        sigma = sqrt(rho (1 - rho))                   the standard deviation of a set's reward, which is 1 or 0
        A     = (1 - rho) / sigma                     of a right response
        A     = (1 - rho - q) / sigma                 of a wrong one, with the share q of its sets that are all wrong,
        q     = C(n - c - 1, k - 1) / C(n - 1, k - 1)

    for the n samples that the group has in the batch, c of them right: the mean, over the sets that a response is in,
    of GRPO's advantage of the set. Source: Chen et al., arXiv:2508.10751, analytical derivation, and its authors' code,
    which adds 1e-6 to sigma as this does. sigma is that of the whole population of sets, without Bessel's correction:
    with k = 1 these are GRPO's advantages but for that.

    A group of k samples or fewer, a group of one among them, has no two sets to compare: its advantages are 0. So are
    they where no response is right, and where every set has a right one.

    `right` (B,) bool, `group_ids` (B,) int64, `k` at least 1. Returns the advantages, (B,) float32 found in float64,
    and the mean of rho over the groups of at least k samples, None without any. Raises ValueError for columns of other
    shapes or types.
    """
    check_mask("pass_at_k_advantages", right)
    check_rows("pass_at_k_advantages", rows=len(right), right=right, group_ids=group_ids)
    groups = Groups.of(group_ids)
    size, correct = groups.sizes(), groups.sums(right)
    wrong = size - correct
    no_right = _share_of_sets(wrong, size, k)
    others_wrong = _share_of_sets(wrong - 1, size - 1, k - 1)
    scale = (no_right * (1 - no_right)).sqrt() + STD_EPSILON
    of_right, of_wrong = no_right / scale, (no_right - others_wrong) / scale
    differ = (no_right > 0) & (no_right < 1)  # neither where there is one set, or none
    advantages = torch.where(right, groups.of_samples(of_right), groups.of_samples(of_wrong))
    estimable = (1 - no_right)[size >= k]
    advantages = advantages.where(groups.of_samples(differ), 0.0)
    return advantages.to(torch.float32), float(estimable.mean()) if len(estimable) else None


def _share_of_sets(some: Tensor, size: Tensor, k: int) -> Tensor:
    """Return (G,) float64: C(some, k) / C(size, k), the share of sets of k that are of `some` alone; 0 where some < k.

    As a product of k quotients, which stays a number where the binomial coefficients would not.
    """
    share = torch.ones_like(size)
    for taken in range(k):
        share = share * ((some - taken) / (size - taken).clamp(min=1)).clamp(min=0)
    return share
