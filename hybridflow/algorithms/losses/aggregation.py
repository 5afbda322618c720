"""How per-token losses become one loss, exactly, however the mini-batch is cut up.

A mean taken inside each micro-batch or each rank depends on the cut. So the weight of every token is computed once,
over the whole mini-batch, and travels with the token: the loss of the mini-batch is the plain sum of weight * token
loss, in whatever pieces and on whatever ranks that sum is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

_WIDE = "chosen_logprobs"
"""How the names of columns end that have K figures of each token."""

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def sequence_weights(counts: Tensor, mode: AggregationMode, *, normalising_length: int | None = None) -> Tensor:
    """What each counted token of a sequence weighs in a mini-batch, so that sum(weights * token_losses) is its loss.

    With N counted tokens in all, n_i of them in sequence i, and M sequences that have any:

        token-mean                1 / N            DAPO, arXiv:2503.14476
        seq-mean-token-mean       1 / (M n_i)      GRPO, arXiv:2402.03300
        seq-mean-token-sum        1 / M
        seq-mean-token-sum-norm   1 / (M L)        Dr. GRPO, arXiv:2503.20783, with L = normalising_length

    Where public implementations differ: verl's `seq-mean-token-sum-norm` divides by L alone and not by M, with the
    width of the padded batch as L unless it is set. A sequence of which no token counts is none of the M here.

    `counts` (B,) int64: the counted tokens of each sequence of the **whole** mini-batch over all data-parallel ranks.
    Returns (B,) float32, 0 for a sequence without any. Raises ValueError if no token is counted, or if
    `normalising_length` is missing where the mode needs it or given where it does not.
    """
    if normalising_length is not None and mode != "seq-mean-token-sum-norm":
        raise ValueError(f"loss weights: normalising_length is {normalising_length}, expected none with mode {mode!r}")
    lengths = counts.to(torch.float64)
    some = (lengths > 0).to(torch.float64)
    sequences = some.sum()
    if int(sequences) == 0:
        raise ValueError(f"loss weights: none of {len(counts)} sequences has a token to learn from")
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


def counted_column(where: str, name: str, column: Tensor, weights: Tensor) -> Tensor:
    """A column in float32 with 0 for every token of weight 0, so that nothing it held can reach a loss or a gradient.

    One of log-probs of chosen tokens may have a further dimension, of K figures of each token. Raises ValueError for
    any other shape than that of `weights`; `where` and `name` say which column of which loss it is.
    """
    wide = name.endswith(_WIDE) and column.dim() == weights.dim() + 1
    if column.shape[: weights.dim()] != weights.shape or (column.dim() > weights.dim() and not wide):
        raise ValueError(f"{where}: {name} has shape {tuple(column.shape)}, weights {tuple(weights.shape)}")
    counted = weights > 0
    return column.float().where(counted[..., None] if wide else counted, 0.0)
