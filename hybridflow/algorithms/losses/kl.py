"""Estimators of the KL divergence between two policies from log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from hybridflow.algorithms.checks import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
STRAIGHT_THROUGH: tuple[KLEstimator, ...] = ("k1+", "k3+")
"""The estimators with a gradient that is not that of their value."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before `exp`, whose overflow would make the gradient of a clipped token
0 * inf = nan. exp(20) is 5e8: no ratio that carries information comes near it."""


PENALTY_LIMIT = 10.0
"""The most that k3 of one token counts in a penalty, in nats; see `kl_penalty`."""


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(pi || other) per token, for tokens sampled from pi.

    With d = log other(token) - log pi(token):

        k1 = -d                 unbiased, of either sign, high variance
        k2 = d^2 / 2            biased, never negative; its gradient is the gradient of the KL
        k3 = exp(d) - 1 - d     unbiased, never negative, low variance (used in GRPO, arXiv:2402.03300, eq. 4)
        k1+, k3+                the value of k1 or k3 with the gradient of k2 (straight-through)

    An estimator whose value is right in expectation need not have a gradient that is. Over tokens from pi:

        E[grad k1] = E[grad log pi] = 0
        E[grad k2] = E[-d grad log pi] = grad KL(pi || other)
        E[grad k3] = E[(1 - exp(d)) grad log pi] = -E_other[grad log pi] = grad KL(other || pi)

    So k3 in a loss pulls the policy to cover all that the other does, where KL(pi || other) has it keep to what the
    other does: the divergence of the other direction. It stays the default in losses, as in GRPO. k3+ has the gradient
    of the divergence that its value estimates. Sources: Tang and Munos, arXiv:2506.09477; Liu et al., arXiv:2510.01555;
    the names are verl's (`core_algos.kl_penalty`). As there, tokens of an older policy have no importance weight here.

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
        case "k1+" | "k3+":
            return _with_gradient_of_k2(kl_estimate(logprobs, other_logprobs, value_of(estimator)), difference)
        case _:
            assert_never(estimator)


def value_of(estimator: KLEstimator) -> Literal["k1", "k2", "k3"]:
    """Compute the estimator whose value this one has: itself, or k1 of k1+ and k3 of k3+."""
    match estimator:
        case "k1+":
            return "k1"
        case "k3+":
            return "k3"
    return estimator


def _with_gradient_of_k2(value: Tensor, difference: Tensor) -> Tensor:
    """Compute the value, to the last bit, with the gradient of difference^2 / 2."""
    # Its value is 0 exactly. That of k2 - k2.detach() would be nan where the square overflows.
    through = difference - difference.detach()
    return value.detach() + difference.detach() * through


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(pi || reference) per token for a loss or a reward: `kl_estimate`, with k3 bounded.

        k3 -> min(k3, 10)

    k3 grows with exp(d). One token that the reference finds e^18 times as likely would have 6.6e7 times the value and
    gradient of another, and clipping the gradient's norm would then erase all others. So a token counts 10 at most, as
    in verl (`core_algos.kl_penalty`, "low_var_kl"). In a loss such a token has no gradient; below the limit its slope
    is at most 12.6 for d > 0 (d = 2.6) and 1 for d < 0 (d = -11). k1 and k2 have slopes of 1 and |d|, and stay as they
    are; so does the slope of k3+, |d|, also of a token whose value is at the limit. The share of tokens at the limit is
    the metric `train/reference_kl_capped`.

    Shapes and errors as for `kl_estimate`.
    """
    kl = kl_estimate(logprobs, reference_logprobs, value_of(estimator))
    if value_of(estimator) == "k3":
        kl = kl.clamp(max=PENALTY_LIMIT)
    return _with_gradient_of_k2(kl, reference_logprobs - logprobs) if estimator in STRAIGHT_THROUGH else kl
