"""Covariance of log-prob and advantage, token by token (Cui et al., arXiv:2505.22617)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_shapes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CovarianceMeans:
    """Means that covariances are taken around, over the N loss tokens of a mini-batch."""

    logprob: float
    advantage: float
    count: int

    @classmethod
    def of(cls, logprobs: Sequence[float], advantages: Sequence[float], counts: Sequence[int]) -> CovarianceMeans:
        """Compute the means from each sample's sums and counts, with the same bits in any order. No token gives 0."""
        count = sum(counts)
        # fsum rounds once, at the end, so order has no part in it.
        return cls(math.fsum(logprobs) / max(count, 1), math.fsum(advantages) / max(count, 1), count)


def sample_sums(column: Tensor, loss_mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the (B,) float64 sum over each sample's loss tokens, rounded once.

    The same bits with any other samples in the batch, which a sum by torch does not promise. `column` and `loss_mask`
    (R,), `lengths` (B,) int64 tokens of each sample, end to end. Raises ValueError for columns of other shapes.
    """
    check_shapes("sample_sums", dimensions=1, column=column, loss_mask=loss_mask)
    masked = column.to(torch.float64).where(loss_mask, 0.0)
    sums = [math.fsum(of_sample.tolist()) for of_sample in masked.split(lengths.tolist())]
    return torch.tensor(sums, dtype=torch.float64)


def token_covariances(logprobs: Tensor, advantages: Tensor, means: CovarianceMeans) -> Tensor:
    """Compute each token's term of the covariance, float64 in the tensors' one shape.

        cov_t = (log pi(token_t) - mean log pi) * (A_t - mean A)        arXiv:2505.22617, section 4.2

    A large one is a likely token with a large advantage, or an unlikely one with a very negative one: its update lowers
    the entropy. Raises ValueError for tensors of other shapes.
    """
    check_shapes("token_covariances", logprobs=logprobs, advantages=advantages)
    return (logprobs.to(torch.float64) - means.logprob) * (advantages.to(torch.float64) - means.advantage)
