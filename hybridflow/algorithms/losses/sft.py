"""Supervised fine-tuning: the negative log-likelihood of given responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.algorithms.losses.aggregation import masked_column
from hybridflow.algorithms.losses.statistics import Statistics, total
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor


def sft_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Statistics]:
    """Compute loss = -sum_t weight_t * log pi(token_t): the part of it that these tokens contribute, and its
    statistics.

    Both tensors have one shape, any shape. `weights` come from `sequence_weights` over the whole mini-batch; a token of
    weight 0 contributes nothing, whatever its log-prob. Returns a float32 scalar and the statistics.
    """
    loss = -(masked_column("sft_loss", "logprobs", logprobs, weights) * weights).sum()
    return loss, Statistics(sums={metrics.SFT_LOSS: total(loss)})
