"""Log-probs and entropies of next tokens from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from engine3d.collectives import all_reduce

# On a CPU tokens are worked through in pieces, so that the float32 copies of the logits stay below this.
_PIECE_BYTES = 512 << 20


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    group: ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, softmax(logits / temperature).

        logprob = x[target] - log(sum(exp(x)))          entropy = log(sum(exp(x))) - sum(softmax(x) * x)

    A logit of -inf is a token that cannot be drawn: its probability, its part of the entropy (the limit of p log p) and
    its gradient are 0. The gradient of the entropies is only computed where a loss uses them.

    Args:
        logits: (N, V / tp) of any floating dtype, this rank's slice of the (padded) vocabulary; carries the gradient.
        targets: (N,) int64 global token ids.
        vocabulary: real vocabulary size; the columns past it are padding and get no probability.
        group: the tensor-parallel group.
        temperature: above 0.
        with_entropy: without it the entropies are zeros.
        overwrite: the backward pass may write the gradient over the logits, which are by far the largest tensor of a
            step; for logits that nothing else reads.

    Returns:
        (N,) float32 log-probs and (N,) float32 entropies in nats, the same on every rank of the group. Each rank may
        use them in a loss that all ranks compute alike: the gradient is that of its own logits.
    """
    return _LogProbs.apply(logits.contiguous(), targets, vocabulary, group, temperature, with_entropy, overwrite)


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
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[1]
        first = group.rank() * width
        real = max(0, min(width, vocabulary - first))
        local = targets - first
        facts = _facts(logits, local, real, temperature)
        own = facts[0].clone()
        all_reduce(facts[0], ReduceOp.MAX, group)
        highest, total, weighted, chosen = facts
        if real:  # in terms of the highest of all ranks
            # A slice of -inf alone has no part in the sums.
            down = (own - highest).where(own > -torch.inf, 0.0)
            weighted.add_(total * down).mul_(down.exp())
            total.mul_(down.exp())
            chosen.add_(torch.where((local >= 0) & (local < real), down, 0.0))
        all_reduce(facts[1:], ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(total)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, highest + log_total, entropy)
        ctx.settings = (real, temperature, with_entropy, overwrite)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local, normaliser, entropy = ctx.saved_tensors
        real, temperature, with_entropy, overwrite = ctx.settings
        result = logits if overwrite else torch.empty_like(logits)
        slopes = (
            torch.zeros_like(normaliser) if of_logprob is None else of_logprob.contiguous(),
            of_entropy.contiguous() if with_entropy and of_entropy is not None else None,
        )
        if logits.is_cuda:
            from engine3d.training import vocab_kernels

            vocab_kernels.gradient(logits, local, real, temperature, normaliser, entropy, *slopes, result)
        else:
            _gradient(logits, local, real, temperature, normaliser, entropy, *slopes, result)
        return result, None, None, None, None, None, None


def _facts(logits: Tensor, local: Tensor, real: int, temperature: float) -> Tensor:
    """As `vocab_kernels.facts`, also for slices that are all padding."""
    if real and logits.is_cuda:
        from engine3d.training import vocab_kernels  # Triton is slow to import

        return vocab_kernels.facts(logits, local, real, temperature)
    facts = torch.zeros(4, logits.shape[0], dtype=torch.float32, device=logits.device)
    highest, total, weighted, chosen = facts
    if not real:
        highest.fill_(-torch.inf)
        return facts
    for piece in _pieces(*logits.shape):
        x = logits[piece, :real].float().div(temperature)
        highest[piece] = x.amax(dim=1)
        x.sub_(highest[piece, None].where(highest[piece, None] > -torch.inf, 0.0))
        e = x.exp()
        total[piece] = e.sum(dim=1)
        weighted[piece] = (e * x).where(x > -torch.inf, 0.0).sum(dim=1)
        at = x.gather(1, local[piece].clamp(0, real - 1)[:, None]).squeeze(1)
        chosen[piece] = torch.where((local[piece] >= 0) & (local[piece] < real), at, 0.0)
    return facts


def _gradient(
    logits: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    result: Tensor,
) -> None:
    """As `vocab_kernels.gradient`."""
    for piece in _pieces(*logits.shape):
        log_p = logits[piece, :real].float().div(temperature).sub_(normaliser[piece, None])
        scale = of_logprob[piece, None]
        if of_entropy is not None:
            # d entropy / d x_j = -p_j (log p_j + entropy)
            scale = scale + of_entropy[piece, None] * (log_p + entropy[piece, None]).where(log_p > -torch.inf, 0.0)
        slope = log_p.exp_().mul_(scale).neg_()
        if real:
            mine = (local[piece] >= 0) & (local[piece] < real)
            add = torch.where(mine, of_logprob[piece], 0.0)
            slope.scatter_add_(1, local[piece].clamp(0, real - 1)[:, None], add[:, None])
        result[piece, :real] = slope.div_(temperature).to(result.dtype)
        result[piece, real:] = 0


def _pieces(count: int, width: int) -> list[slice]:
    step = max(1, _PIECE_BYTES // (4 * max(1, width)))
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]
