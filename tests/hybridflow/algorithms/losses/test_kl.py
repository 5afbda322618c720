"""Estimators of the KL divergence."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.losses.kl import PENALTY_LIMIT, KLEstimator, kl_estimate, kl_penalty, value_of


def test_kl_estimators_by_hand() -> None:
    logprobs, other = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(logprobs, other, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(logprobs, other, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(logprobs, other, "k3").item() == pytest.approx(0.5 - 1 + math.log(2), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_true_kl_as_expectation(estimator: KLEstimator) -> None:
    torch.manual_seed(1)
    p, q = torch.randn(50).double().log_softmax(0), torch.randn(50).double().log_softmax(0)
    expectation = (p.exp() * kl_estimate(p, q, estimator)).sum().item()
    assert expectation == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-9)


def test_the_gradient_of_k2_is_the_gradient_of_the_kl() -> None:
    torch.manual_seed(1)
    logits, q = torch.randn(20).double().requires_grad_(), torch.randn(20).double().log_softmax(0)
    p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((p.exp().detach() * kl_estimate(p, q, "k2")).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_one_token_far_away_does_not_drown_the_others() -> None:
    reference = torch.zeros(7)
    logprobs = torch.tensor([-18.0, -40.0, -2.61, -2.5, -0.5, 0.3, 30.0], requires_grad=True)
    penalty = kl_penalty(logprobs, reference, "k3")
    penalty.sum().backward()
    assert logprobs.grad is not None
    assert penalty.max().item() == PENALTY_LIMIT
    assert logprobs.grad.abs().max().item() < 13
    exact = kl_estimate(logprobs, reference, "k3")
    torch.testing.assert_close(penalty[2:6], exact[2:6])
    torch.testing.assert_close(logprobs.grad[2:6], 1 - (-logprobs[2:6]).exp())
    for estimator in ("k1", "k2"):
        assert torch.equal(kl_penalty(logprobs, reference, estimator), kl_estimate(logprobs, reference, estimator))


def test_log_probs_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_estimate: other_logprobs has shape \(3, 1\) and logprobs \(3,\)"):
        kl_estimate(torch.zeros(3), torch.zeros(3, 1), "k1")


@pytest.mark.parametrize(("estimator", "value"), [("k1+", math.log(2)), ("k3+", 0.5 - 1 + math.log(2))])
def test_straight_through_estimators_by_hand(estimator: KLEstimator, value: float) -> None:
    """The value of k1 or k3; the slope of k2, log pi - log other: log 2 here."""
    logprobs = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([math.log(0.25)], dtype=torch.float64)
    kl = kl_estimate(logprobs, other, estimator)
    assert kl.item() == pytest.approx(value)
    assert kl.item() == kl_estimate(logprobs, other, value_of(estimator)).item()
    (slope,) = torch.autograd.grad(kl, logprobs)
    assert slope.item() == pytest.approx(math.log(2))


def test_which_divergence_the_gradient_of_each_estimator_is_of() -> None:
    """The expectation over the policy, by autograd of exact sums: k3 has the gradient of the reverse divergence, k1 of
    none.
    """
    torch.manual_seed(1)
    logits, q = torch.randn(20).double().requires_grad_(), torch.randn(20).double().log_softmax(0)
    p = logits.log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    forward, reverse = gradient((p.exp() * (p - q)).sum()), gradient((q.exp() * (q - p)).sum())
    assert not torch.allclose(forward, reverse, rtol=0.1)
    exact: dict[KLEstimator, torch.Tensor] = {
        **{"k1": torch.zeros(20).double(), "k2": forward, "k3": reverse},
        **{"k1+": forward, "k3+": forward},
    }
    for estimator, expected in exact.items():
        torch.testing.assert_close(gradient((p.exp().detach() * kl_estimate(p, q, estimator)).sum()), expected)


def test_a_straight_through_penalty_is_bounded_in_value_and_has_its_gradient_everywhere() -> None:
    logprobs = torch.tensor([-18.0, -1.0, -1e30], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.zeros(3), "k3+")
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx([PENALTY_LIMIT, math.e - 2, PENALTY_LIMIT])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-18.0, -1.0, -1e30])
    assert torch.equal(kl_penalty(logprobs, torch.zeros(3), "k1+"), kl_estimate(logprobs, torch.zeros(3), "k1"))
