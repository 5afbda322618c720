"""Divergences of a student's distribution of the next token from a teacher's, of which k log-probs are known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, assert_never

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

TAIL_FLOOR = 1e-6
"""The least that the probability of all tokens but the k counts as: float32 log-probs of k tokens say no more of what
is left, and the logarithm of 0 would be infinite."""


def with_tail(logprobs: Tensor) -> Tensor:
    """Add the log-prob of all other tokens together: (..., k) float32 log-probs of k different tokens -> (..., k + 1).

    Where it is at `TAIL_FLOOR`, it has no gradient.
    """
    # In float64: what is left is a small difference of numbers near 1.
    rest = 1 - logprobs.double().exp().sum(dim=-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=TAIL_FLOOR).log().to(logprobs.dtype)], dim=-1)


def truncated_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, *, divergence: Divergence, jsd_beta: float = 0.5
) -> Tensor:
    """Compute the divergence of the student, q, from the teacher, p, in the distribution of each next token.

    The vocabulary becomes k + 1 outcomes: each of the k tokens, and all others together (`with_tail`). Over these

        reverse_kl    sum q (log q - log p)                                 MiniLLM, arXiv:2306.08543, eq. 1
        forward_kl    sum p (log p - log q)
        jsd           beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q
                                                                            GKD, arXiv:2306.13649, section 2

    Joining outcomes never makes a divergence of this kind (an f-divergence) larger, so this is a lower bound of the
    divergence over the whole vocabulary, never negative, and 0 exactly where both give the k tokens the same
    probabilities. It grows with k up to the divergence itself. Others renormalise both over the k tokens; that compares
    how they divide what they give these tokens and not how much it is: a student that gives all k tokens a
    millionth of the teacher's probability, and the rest to others, would have a loss of 0.

    Args:
        logprobs: (..., k) float32 of the student; carry the gradient.
        teacher_logprobs: (..., k) float32 of the same tokens, no two alike.
        divergence: which.
        jsd_beta: between 0 and 1; divided by it, "jsd" goes to "forward_kl" as it goes to 0.

    Returns:
        (...) float32, in nats.

    Raises:
        ValueError: tensors of two shapes.
    """
    check_shapes("truncated_divergence", logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    q, p = with_tail(logprobs), with_tail(teacher_logprobs)
    match divergence:
        case "reverse_kl":
            return _kl(q, p)
        case "forward_kl":
            return _kl(p, q)
        case "jsd":
            mixed = torch.logaddexp(p + math.log(jsd_beta), q + math.log1p(-jsd_beta))
            return jsd_beta * _kl(p, mixed) + (1 - jsd_beta) * _kl(q, mixed)
        case _:
            assert_never(divergence)


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return (of.exp() * (of - to)).sum(dim=-1)
