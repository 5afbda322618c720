"""One pass over the logits of a GPU for the statistics of log-probs and entropies, and one for the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
_WARPS = 8


def softmax_stats(logits: Tensor, local: Tensor, real: int, temperature: float) -> Tensor:
    """Compute the statistics that `vocab_parallel` reduces over ranks, in terms of x = logits / temperature.

    Args:
        logits: (N, V) of any floating dtype, contiguous.
        local: (N,) int64 columns of the targets; one outside [0, real) is another rank's.
        real: columns of these that are no padding, at least 1.
        temperature: above 0.

    Returns:
        (4, N) float32: m = max(x), sum(exp(x - m)), sum(exp(x - m) * (x - m)), and x[local] - m, or 0. Of a row with a
        logit that is nan or +inf the sum is nan, and the others are undefined.
    """
    count, width = logits.shape
    result = torch.empty(4, count, dtype=torch.float32, device=logits.device)
    if count:
        _softmax_stats[(count,)](
            logits, local, result, count, width, real, 1 / temperature, COLUMNS=_COLUMNS, num_warps=_WARPS
        )
    return result


def gradient(
    logits: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_all: Tensor,
    of_entropy: Tensor | None,
    result: Tensor,
) -> None:
    """Write the gradient of the logits to `result`, which may be the logits themselves.

    Args:
        logits, local, real, temperature: as in `softmax_stats`.
        normaliser: (N,) float32, log(sum(exp(x))) over all ranks.
        entropy: (N,) float32.
        of_logprob: (N,) float32, the gradient of the target's log-prob.
        of_all: (N,) float32, the sum of the gradients of all log-probs of the row, the target's among them.
        of_entropy: (N,) float32, the gradient of the entropy; None where entropies were not requested.
        result: (N, V), contiguous; its padding is set to 0.
    """
    count, width = logits.shape
    if count:
        _gradient[(count, triton.cdiv(width, _COLUMNS))](
            logits,
            local,
            normaliser,
            entropy,
            of_logprob,
            of_all,
            of_all if of_entropy is None else of_entropy,
            result,
            width,
            real,
            1 / temperature,
            WITH_ENTROPY=of_entropy is not None,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )


@triton.jit
def _softmax_stats(logits, local, result, count, width, real, inverse_temperature, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    highest = -float("inf")
    total = 0.0
    weighted = 0.0
    no_numbers = 0
    for first in range(0, real, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < real
        x = tl.load(start + column, mask=inside, other=-float("inf")).to(tl.float32) * inverse_temperature
        # Neither the maximum of a block nor `possible` shows a nan.
        no_numbers += tl.sum((x != x).to(tl.int32), axis=0)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        # The sums so far are in terms of the highest so far. At first they are 0, and there is none.
        down = tl.where(highest == -float("inf"), 0.0, highest - higher)
        possible = inside & (x > -float("inf"))
        x = tl.where(possible, x - higher, 0.0)
        e = tl.where(possible, tl.exp(x), 0.0)
        weighted = (weighted + total * down) * tl.exp(down) + tl.sum(e * x, axis=0)
        total = total * tl.exp(down) + tl.sum(e, axis=0)
        highest = higher
    target = tl.load(local + row)
    mine = (target >= 0) & (target < real)
    chosen = tl.load(start + target, mask=mine, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(result + row, highest)
    # The sum makes the log-probs and entropies of this row nan on all ranks.
    total = tl.where(no_numbers > 0, float("nan"), total)
    tl.store(result + count + row, total)
    tl.store(result + 2 * count + row, weighted)
    tl.store(result + 3 * count + row, tl.where(mine, chosen - highest, 0.0))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    local,
    normaliser,
    entropy,
    of_logprob,
    of_all,
    of_entropy,
    result,
    width,
    real,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < real
    x = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    slope = tl.load(of_logprob + row)
    log_p = x - tl.load(normaliser + row)
    scale = tl.load(of_all + row)
    if WITH_ENTROPY:
        # d entropy / d x_j = -p_j (log p_j + entropy), and 0 where p_j is 0
        surprise = tl.where(log_p > -float("inf"), log_p + tl.load(entropy + row), 0.0)
        scale += tl.load(of_entropy + row) * surprise
    change = -tl.exp(log_p) * scale
    change += tl.where(column == tl.load(local + row), slope, 0.0)
    change = tl.where(inside, change * inverse_temperature, 0.0)
    tl.store(result + row * width + column, change.to(result.dtype.element_ty), mask=column < width)
