"""Supervised fine-tuning: the negative log-likelihood of given responses."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow import metrics
from hybridflow.algorithms.statistics import Statistics


def sft_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Statistics]:
    """loss = -sum_t weight_t * log pi(token_t): the part of it that these tokens contribute, and its statistics.

    Both tensors have one shape, any shape. `weights` come from `token_weights` over the whole mini-batch; a token of
    weight 0 contributes nothing, whatever its log-prob. Returns a float32 scalar and the statistics.
    """
    if logprobs.shape != weights.shape:
        raise ValueError(f"sft_loss: logprobs has shape {tuple(logprobs.shape)}, weights {tuple(weights.shape)}")
    loss = -(logprobs.float().where(weights > 0, 0.0) * weights).sum()
    return loss, Statistics(sums={metrics.SFT_LOSS: loss.detach().to(torch.float64)})
