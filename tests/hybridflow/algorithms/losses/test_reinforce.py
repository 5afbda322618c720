"""The policy gradient without a ratio."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import TokenColumns, policy_gradient_loss
from hybridflow.algorithms.losses.reinforce import reinforce_loss
from hybridflow.algorithms.opo import OPOSettings
from hybridflow.metrics import names as metrics


def test_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old = torch.tensor([-1.0, -1.5, -0.5])
    advantages = torch.tensor([2.0, -1.0, 0.0])
    loss = reinforce_loss(TokenColumns(logprobs, old, advantages, torch.ones(3, dtype=torch.bool)), OPOSettings())
    assert loss.loss.tolist() == [2.0, -2.0, 0.0]
    torch.testing.assert_close(loss.ratio, torch.tensor([0.0, -0.5, 0.0]).exp())
    assert not loss.ratio.requires_grad
    (gradient,) = torch.autograd.grad(loss.loss.sum(), logprobs)
    assert gradient.tolist() == [-2.0, 1.0, 0.0]  # whatever the ratio is


def test_a_log_ratio_beyond_any_number_is_measured_as_one() -> None:
    logprobs = torch.tensor([-200.0, 0.0])
    columns = TokenColumns(logprobs, -200.0 - logprobs, torch.ones(2), torch.ones(2, dtype=torch.bool))
    assert reinforce_loss(columns, OPOSettings()).ratio.isfinite().all()


def test_on_policy_the_gradient_is_that_of_the_clipped_surrogate() -> None:
    torch.manual_seed(0)
    logprobs = (-torch.rand(40)).requires_grad_()
    weights = torch.rand(40)
    columns = {"advantages": torch.randn(40), "weights": weights}
    results, gradients = [], []
    for config, policy_loss in ((OPOSettings(), reinforce_loss), (GRPOSettings(), clipped_loss)):
        loss, statistics = policy_gradient_loss(logprobs, config=config, policy_loss=policy_loss, **columns)
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
        results.append(statistics.values())
    torch.testing.assert_close(*gradients)
    assert results[0][metrics.TRAIN_RATIO] == results[1][metrics.TRAIN_RATIO] == 1.0
    assert results[0][metrics.TRAIN_LOSS] != pytest.approx(results[1][metrics.TRAIN_LOSS])
    assert metrics.TRAIN_CLIP_FRACTION_LOW not in results[0]
