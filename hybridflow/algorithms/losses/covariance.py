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
    """What covariances are taken around: means over the N tokens of a mini-batch that count."""

    logprob: float
    advantage: float
    count: int

    @classmethod
    def of(cls, logprobs: Sequence[float], advantages: Sequence[float], counts: Sequence[int]) -> CovarianceMeans:
        """From the sums and numbers of each sample: the same bits in whatever order they come. 0 of no token."""
        count = sum(counts)
        # fsum rounds once, at the end, so order has no part in it.
        return cls(math.fsum(logprobs) / max(count, 1), math.fsum(advantages) / max(count, 1), count)


def sample_sums(column: Tensor, counted: Tensor, lengths: Tensor) -> Tensor:
    """(B,) float64: for each sample the sum over its tokens that count, rounded once.

    The same bits whichever samples stand beside it, which a sum by torch does not promise. `column` and `counted` (R,),
    `lengths` (B,) int64 tokens of each sample, end to end. Raises ValueError for columns of other shapes.
    """
    check_shapes("sample_sums", dimensions=1, column=column, counted=counted)
    counted_only = column.to(torch.float64).where(counted, 0.0)
    sums = [math.fsum(of_sample.tolist()) for of_sample in counted_only.split(lengths.tolist())]
    return torch.tensor(sums, dtype=torch.float64)


def token_covariances(logprobs: Tensor, advantages: Tensor, means: CovarianceMeans) -> Tensor:
    """float64 of the tensors' one shape: what each token adds to the covariance.

        cov_t = (log pi(token_t) - mean log pi) * (A_t - mean A)        arXiv:2505.22617, section 4.2

    A large one is a likely token with a large advantage, or an unlikely one with a very negative one: its update lowers
    the entropy. Raises ValueError for tensors of other shapes.
    """
    check_shapes("token_covariances", logprobs=logprobs, advantages=advantages)
    return (logprobs.to(torch.float64) - means.logprob) * (advantages.to(torch.float64) - means.advantage)
