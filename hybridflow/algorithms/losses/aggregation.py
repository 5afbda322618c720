"""Aggregation of per-token losses into one loss, exact for any split of the mini-batch.

A mean taken inside each micro-batch or each rank depends on the cut. So the weight of every token is computed once,
over the whole mini-batch, and travels with the token: the loss of the mini-batch is the plain sum of weight * token
loss, however the sum is split over micro-batches and ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

_WIDE = "chosen_logprobs"
"""Suffix of the names of columns with K values of each token."""

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def sequence_weights(counts: Tensor, mode: AggregationMode, *, normalising_length: int | None = None) -> Tensor:
    """Compute the weight of each loss token of a sequence, so that the mini-batch's loss is sum(weights *
    token_losses).

    With N loss tokens in all, n_i of them in sequence i, and M sequences that have any:

        token-mean                1 / N            DAPO, arXiv:2503.14476
        seq-mean-token-mean       1 / (M n_i)      GRPO, arXiv:2402.03300
        seq-mean-token-sum        1 / M
        seq-mean-token-sum-norm   1 / (M L)        Dr. GRPO, arXiv:2503.20783, with L = normalising_length

    Where public implementations differ: verl's `seq-mean-token-sum-norm` divides by L alone and not by M, with the
    width of the padded batch as L unless it is set. A sequence of which no token counts is none of the M here.

    `counts` (B,) int64: the loss tokens of each sequence of the **whole** mini-batch over all data-parallel ranks.
    Returns (B,) float32, 0 for a sequence without any. Raises ValueError if there is no loss token, or if
    `normalising_length` is missing where the mode needs it or given where it does not.
    """
    if normalising_length is not None and mode != "seq-mean-token-sum-norm":
        raise ValueError(f"loss weights: normalising_length is {normalising_length}, expected none with mode {mode!r}")
    lengths = counts.to(torch.float64)
    some = (lengths > 0).to(torch.float64)
    sequences = some.sum()
    if int(sequences) == 0:
        raise ValueError(f"loss weights: none of {len(counts)} sequences has a loss token")
    match mode:
        case "token-mean":
            weights = some / lengths.sum()
        case "seq-mean-token-mean":
            weights = some / lengths.clamp(min=1) / sequences
        case "seq-mean-token-sum":
            weights = some / sequences
        case "seq-mean-token-sum-norm":
            if normalising_length is None:
                raise ValueError(f"loss weights: mode {mode!r} needs normalising_length")
            weights = some / (sequences * normalising_length)
        case _:
            assert_never(mode)
    return weights.to(torch.float32)


def masked_column(where: str, name: str, column: Tensor, weights: Tensor) -> Tensor:
    """Return a column in float32 with 0 for every token of weight 0, so that its value cannot reach a loss or a
    gradient.

    One of log-probs of chosen tokens may have a further dimension, of K values of each token. Raises ValueError for
    any other shape than that of `weights`; `where` and `name` say which column of which loss it is.
    """
    wide = name.endswith(_WIDE) and column.dim() == weights.dim() + 1
    if column.shape[: weights.dim()] != weights.shape or (column.dim() > weights.dim() and not wide):
        raise ValueError(f"{where}: {name} has shape {tuple(column.shape)}, weights {tuple(weights.shape)}")
    loss_mask = weights > 0
    return column.float().where(loss_mask[..., None] if wide else loss_mask, 0.0)
