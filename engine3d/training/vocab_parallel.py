"""Log-probs and entropies of next tokens from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

# Tokens are worked through in pieces, so that the float32 copies of the logits stay below this.
_PIECE_BYTES = 512 << 20


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    group: ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, softmax(logits / temperature).

        logprob = x[target] - log(sum(exp(x)))          entropy = log(sum(exp(x))) - sum(softmax(x) * x)

    Args:
        logits: (N, V / tp) of any floating dtype, this rank's slice of the (padded) vocabulary; carries the gradient.
        targets: (N,) int64 global token ids.
        vocabulary: real vocabulary size; the columns past it are padding and get no probability.
        group: the tensor-parallel group.
        temperature: above 0.
        with_entropy: without it the entropies are zeros.

    Returns:
        (N,) float32 log-probs and (N,) float32 entropies in nats, the same on every rank of the group. Each rank may
        use them in a loss that all ranks compute alike: the gradient is that of its own logits.
    """
    return _LogProbs.apply(logits, targets, vocabulary, group, temperature, with_entropy)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: int,
        group: ProcessGroup,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count, width = logits.shape
        first = group.rank() * width
        real = max(0, min(width, vocabulary - first))
        facts = torch.zeros(4, count, dtype=torch.float32, device=logits.device)
        highest, total, chosen, weighted = facts
        highest.fill_(-torch.inf)
        for piece in _pieces(count, width):
            if real:
                highest[piece] = logits[piece, :real].amax(dim=1).float() / temperature
        all_reduce(highest, ReduceOp.MAX, group)
        for piece in _pieces(count, width):
            x = logits[piece, :real].float().div(temperature).sub_(highest[piece, None])
            local = targets[piece] - first
            mine = (local >= 0) & (local < real)
            if real:
                at = x.gather(1, local.clamp(0, real - 1)[:, None]).squeeze(1)
                chosen[piece] = torch.where(mine, at, torch.zeros_like(at))
            e = x.exp()
            total[piece] = e.sum(dim=1)
            if with_entropy:
                weighted[piece] = (e * x).sum(dim=1)
        all_reduce(facts[1:], ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(total)
        ctx.save_for_backward(logits, targets, highest + log_total, entropy)
        ctx.sizes = (first, real, temperature, with_entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, normaliser, entropy = ctx.saved_tensors
        first, real, temperature, with_entropy = ctx.sizes
        of_logprob, of_entropy = gradients
        result = torch.zeros_like(logits)
        for piece in _pieces(*logits.shape):
            log_p = logits[piece, :real].float().div(temperature).sub_(normaliser[piece, None])
            p = log_p.exp()
            if with_entropy:
                # d entropy / d x_j = -p_j (log p_j + entropy)
                scale = of_logprob[piece, None] + of_entropy[piece, None] * (log_p + entropy[piece, None])
                slope = p.mul_(scale).neg_()
            else:
                slope = p.mul_(-of_logprob[piece, None])
            local = targets[piece] - first
            mine = (local >= 0) & (local < real)
            if real:
                add = torch.where(mine, of_logprob[piece], torch.zeros_like(of_logprob[piece]))
                slope.scatter_add_(1, local.clamp(0, real - 1)[:, None], add[:, None])
            result[piece, :real] = slope.div_(temperature).to(result.dtype)
        return result, None, None, None, None, None


def _pieces(count: int, width: int) -> list[slice]:
    step = max(1, _PIECE_BYTES // (4 * max(1, width)))
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]
