"""Tokens that Clip-Cov and KL-Cov treat otherwise than the rest, chosen over a whole mini-batch and all ranks.

Public implementations choose within each micro-batch of each rank, so that what is chosen depends on the cut, and at
least one token of every micro-batch is. Here the means and the order are of the whole mini-batch. What the driver and
the ranks exchange is three values a sample, and from each rank as many tokens as can be chosen in all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.base import Step
from hybridflow.algorithms.losses.covariance import CovarianceMeans, sample_sums, token_covariances
from hybridflow.algorithms.losses.selection import Keys, SelectionLimit, share_of, token_numbers
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns

if TYPE_CHECKING:
    from torch import Tensor

SELECTED = "selected"
"""Column of the chosen tokens: 1 for these, 0 for all others."""

_LOGPROBS, _ADVANTAGES, _COUNT = "logprobs", "advantages", "count"

type Order = Callable[[SampleBatch, Tensor, Any, int], tuple[npt.NDArray[np.float64], Tensor]]
"""(batch, covariances, settings, salt) -> the rank of each response token, and which of them can be chosen."""


def with_selection[C: AlgorithmSettings](
    step: Step[C], mini_batch: RemoteBatch, order: Order, fraction: float, salt: int = 0
) -> RemoteBatch:
    """Return the mini-batch with the column `selected`: a fraction of its loss tokens, the first in an order.

    Args:
        step: the step.
        mini_batch: with advantages and the weight of each token.
        order: of the tokens, a function of a module.
        fraction: of the tokens that count, rounded down, and at least one: as in the authors' code. Those that
            `algorithm.correction` leaves out do not count, as in verl, whose masks take them from the response.
        salt: what `order` is given.
    """
    mini_batch = step.current_logprobs(mini_batch)
    sums = step.apply(mini_batch, covariance_sums).per_sample()
    means = CovarianceMeans.of(*(sums[name].tolist() for name in (_LOGPROBS, _ADVANTAGES, _COUNT)))
    number = share_of(fraction, means.count)
    keys = step.apply(mini_batch, first_tokens, order=order, means=means, salt=salt, number=number).notes()
    limit = SelectionLimit.of(keys, number)
    return mini_batch.with_columns(
        step.apply(mini_batch, selected_tokens, order=order, means=means, salt=salt, limit=limit)
    )


def covariance_sums(batch: SampleBatch, *, config: Any) -> Columns:
    """Sum log-probs and advantages of each sample over its loss tokens, and count these, as per-sample columns."""
    logprobs, advantages, loss_mask = _columns(batch)
    lengths = batch.response_lengths
    return Columns(
        per_sample={
            _LOGPROBS: sample_sums(logprobs, loss_mask, lengths),
            _ADVANTAGES: sample_sums(advantages, loss_mask, lengths),
            _COUNT: batch.sums(loss_mask),
        }
    )


def first_tokens(
    batch: SampleBatch, *, config: Any, order: Order, means: CovarianceMeans, salt: int, number: int
) -> Columns:
    """Note: the `Keys` of the first tokens of these samples, as many as are to be chosen in all."""
    keys, candidates = _keys(batch, config, order, means, salt)
    return Columns(note=keys.take(candidates).first(number))


def selected_tokens(
    batch: SampleBatch, *, config: Any, order: Order, means: CovarianceMeans, salt: int, limit: SelectionLimit | None
) -> Columns:
    """Compute column `selected`: the tokens within the limit."""
    keys, candidates = _keys(batch, config, order, means, salt)
    return Columns({SELECTED: torch.from_numpy(keys.within(limit) & candidates).float()})


def _keys(
    batch: SampleBatch, config: Any, order: Order, means: CovarianceMeans, salt: int
) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return the key of each response token, and which of them can be chosen."""
    logprobs, advantages, loss_mask = _columns(batch)
    ranks, candidates = order(batch, token_covariances(logprobs, advantages, means), config, salt)
    sample_ids = batch.sample_ids.repeat_interleave(batch.response_lengths)
    keys = Keys(ranks, sample_ids.numpy(), token_numbers(batch.response_lengths).numpy())
    return keys, (candidates & loss_mask).numpy()


def _columns(batch: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, advantages and the loss mask, without the tokens that a correction leaves out."""
    assert batch.current_logprobs is not None
    assert batch.advantages is not None
    assert batch.weights is not None
    loss_mask = batch.response_mask & (batch.weights > 0)
    if batch.correction_weights is not None:
        loss_mask &= batch.correction_weights > 0
    return batch.current_logprobs, batch.advantages, loss_mask
