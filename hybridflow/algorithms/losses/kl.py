"""Estimators of the KL divergence between two policies from log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

from hybridflow.algorithms.checks import check_shapes

KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before `exp`, whose overflow would make the gradient of a clipped token
0 * inf = nan. exp(20) is 5e8: no ratio that carries information comes near it."""


PENALTY_LIMIT = 10.0
"""The most that k3 of one token counts in a penalty, in nats; see `kl_penalty`."""


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(pi || other) for tokens sampled from pi.

    With d = log other(token) - log pi(token):

        k1 = -d                 unbiased, of either sign, high variance
        k2 = d^2 / 2            biased, never negative; its gradient is the gradient of the KL
        k3 = exp(d) - 1 - d     unbiased, never negative, low variance (used in GRPO, arXiv:2402.03300, eq. 4)

    `logprobs` and `other_logprobs` are float tensors of one shape; so is the result. k3 clamps d, see LOG_RATIO_LIMIT.
    Raises ValueError for tensors of two shapes.
    """
    check_shapes("kl_estimate", logprobs=logprobs, other_logprobs=other_logprobs)
    difference = other_logprobs - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return difference.expm1() - difference
        case _:
            assert_never(estimator)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(pi || reference) as it enters a loss or a reward: `kl_estimate`, with k3 bounded.

        k3 -> min(k3, 10)

    k3 grows with exp(d). One token that the reference finds e^18 times as likely would have 6.6e7 times the value and
    gradient of another, and clipping the gradient's norm would then erase all others. So a token counts 10 at most, as
    in verl (`core_algos.kl_penalty`, "low_var_kl"). In a loss such a token has no gradient; below the limit its slope
    is at most 12.6 for d > 0 (d = 2.6) and 1 for d < 0 (d = -11). k1 and k2 have slopes of 1 and |d|, and stay as they
    are. The share of tokens at the limit is the metric `train/reference_kl_capped`.

    Shapes and errors as for `kl_estimate`.
    """
    kl = kl_estimate(logprobs, reference_logprobs, estimator)
    return kl.clamp(max=PENALTY_LIMIT) if estimator == "k3" else kl
