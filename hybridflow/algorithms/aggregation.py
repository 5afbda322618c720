"""How per-token losses become one loss, exactly, however the mini-batch is cut up.

A mean taken inside each micro-batch or each rank depends on the cut. So the weight of every token is computed once,
over the whole mini-batch, and travels with the token: the loss of the mini-batch is the plain sum of weight * token
loss, in whatever pieces and on whatever ranks that sum is taken.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(response_mask: Tensor, mode: AggregationMode, *, normalising_length: int | None = None) -> Tensor:
    """The weight of each token of a whole mini-batch, so that sum(weights * token_losses) is its loss.

    With N counted tokens in all, n_i of them in sequence i, and M sequences that have any:

        token-mean                1 / N            DAPO, arXiv:2503.14476
        seq-mean-token-mean       1 / (M n_i)      GRPO, arXiv:2402.03300
        seq-mean-token-sum        1 / M
        seq-mean-token-sum-norm   1 / (M L)        Dr. GRPO, arXiv:2503.20783, with L = normalising_length

    `response_mask` (B, S') bool: the counted tokens of the **whole** mini-batch over all data-parallel ranks. Returns
    (B, S') float32, 0 outside the mask. Raises ValueError if no token is counted, or if `normalising_length` is
    missing where the mode needs it or given where it does not.
    """
    if normalising_length is not None and mode != "seq-mean-token-sum-norm":
        raise ValueError(f"token_weights: normalising_length is {normalising_length}, expected none with mode {mode!r}")
    mask = response_mask.to(torch.float64)
    lengths = mask.sum(dim=1, keepdim=True)
    sequences = (lengths > 0).sum()
    if int(sequences) == 0:
        raise ValueError(f"token_weights: none of {response_mask.shape[0]} sequences has a token to learn from")
    match mode:
        case "token-mean":
            weights = mask / mask.sum()
        case "seq-mean-token-mean":
            weights = mask / lengths.clamp(min=1) / sequences
        case "seq-mean-token-sum":
            weights = mask / sequences
        case "seq-mean-token-sum-norm":
            if normalising_length is None:
                raise ValueError(f"token_weights: mode {mode!r} needs normalising_length")
            weights = mask / (sequences * normalising_length)
        case _:
            assert_never(mode)
    return weights.to(torch.float32)
