"""Losses of preferences, against cases worked out by hand and the papers' formulas as they stand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.dpo import DPOSettings, dpo_loss
from hybridflow.algorithms.kto import KTOSettings, kto_loss
from hybridflow.algorithms.losses.policy import TokenColumns
from hybridflow.algorithms.losses.preference import (
    PreferenceLoss,
    ResponsePairs,
    coefficient_loss,
    coefficients,
    divergence,
    pair_losses,
    shares_above,
    unpaired_losses,
)
from hybridflow.metrics import names as metrics

MARGINS = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def responses(count: int = 5, seed: int = 0) -> ResponsePairs:
    torch.manual_seed(seed)
    policy = -6 * torch.rand(count, 2, dtype=torch.float64)
    reference = policy + torch.randn(count, 2, dtype=torch.float64)
    tokens = torch.randint(1, 9, (count, 2))
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).repeat(count, 1)[:count]
    return ResponsePairs(policy, reference, tokens, rewards)


# By hand


def test_dpo_by_hand() -> None:
    losses = pair_losses(MARGINS, beta=0.5, loss="sigmoid")
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-1)), math.log(1 + math.exp(1.5))])


def test_label_smoothing_by_hand() -> None:
    losses = pair_losses(MARGINS, beta=0.5, loss="sigmoid", label_smoothing=0.2)
    expected = [-0.8 * math.log(sigmoid(entry)) - 0.2 * math.log(sigmoid(-entry)) for entry in (0.0, 1.0, -1.5)]
    assert losses.tolist() == pytest.approx(expected)


def test_ipo_by_hand() -> None:
    assert pair_losses(MARGINS, beta=0.25, loss="ipo").tolist() == [4.0, 0.0, 25.0]  # the target is 2


def test_margins_far_from_0_have_finite_losses_and_gradients() -> None:
    margins = torch.tensor([1e4, -1e4], dtype=torch.float64, requires_grad=True)
    losses = pair_losses(margins, beta=1.0, loss="sigmoid", label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(losses.sum(), margins)
    assert losses.tolist() == pytest.approx([1e3, 9e3])
    assert gradient.tolist() == pytest.approx([0.1, -0.9])


def test_kto_by_hand() -> None:
    log_ratios, desirable = torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64), torch.tensor([True, False, True])
    z0 = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    losses = unpaired_losses(log_ratios, desirable, z0, beta=2.0, weights=(1.0, 1.5))
    assert not losses.requires_grad
    assert losses.tolist() == pytest.approx([1 - sigmoid(1.5), 1.5 * (1 - sigmoid(-1.5)), 0.5])


def test_kto_compares_with_the_divergence_and_none_below_0() -> None:
    assert divergence(torch.tensor([1.0, -0.5, 0.1], dtype=torch.float64)).item() == pytest.approx(0.2)
    below = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert divergence(below).item() == 0.0
    assert not divergence(below).requires_grad


def test_a_tie_is_half_a_success() -> None:
    assert shares_above(torch.tensor([1.0, 0.5, 0.0]), 0.5).tolist() == [1.0, 0.5, 0.0]


def test_metrics_of_a_pair_of_dpo() -> None:
    pair = ResponsePairs(
        torch.tensor([[-2.0, -5.0]], dtype=torch.float64),
        torch.tensor([[-4.0, -4.0]], dtype=torch.float64),
        torch.tensor([[4, 2]]),
        torch.tensor([[1.0, 0.0]]),
    )
    loss = dpo_loss(pair, DPOSettings(beta=0.5, nll_coef=2.0))
    assert loss.values[metrics.PREFERENCE_LOSS].tolist() == pytest.approx([math.log(1 + math.exp(-1.5)) + 2 * 0.5])
    assert {name: figure.tolist() for name, figure in loss.stats.items()} == {
        metrics.PREFERENCE_ACCURACY: [1.0],
        metrics.PREFERENCE_MARGIN: [1.5],
        metrics.PREFERENCE_CHOSEN_REWARD: [1.0],
        metrics.PREFERENCE_REJECTED_REWARD: [-0.5],
        metrics.PREFERENCE_CHOSEN_LOGPROB: [-2.0],
        metrics.PREFERENCE_REJECTED_LOGPROB: [-5.0],
    }
    by_length = dpo_loss(pair, DPOSettings(beta=0.5, length_normalisation=True))
    assert by_length.stats[metrics.PREFERENCE_MARGIN].tolist() == [0.5 * (2 / 4 - -1 / 2)]


def test_metrics_of_kto_are_of_the_first_responses() -> None:
    two = ResponsePairs(
        torch.tensor([[-2.0, -1.0], [-3.0, -1.0]], dtype=torch.float64),
        torch.tensor([[-3.0, -2.0], [-3.5, -1.0]], dtype=torch.float64),
        torch.tensor([[4, 2], [1, 1]]),
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
    )
    loss = kto_loss(two, KTOSettings(beta=1.0))  # z0 = 0.5; log-ratios 1 and 0.5
    assert loss.losses.tolist() == pytest.approx([1 - sigmoid(0.5), 0.5])
    assert loss.stats[metrics.PREFERENCE_Z0].tolist() == [0.5]
    assert loss.stats[metrics.PREFERENCE_ACCURACY].tolist() == [1.0, 0.5]
    assert loss.stats[metrics.PREFERENCE_CHOSEN_REWARD].tolist() == [1.0]
    assert loss.stats[metrics.PREFERENCE_REJECTED_REWARD].tolist() == [0.5]


# Gradients


def plain_dpo(policy: Tensor, reference: Tensor, tokens: Tensor, config: DPOSettings) -> Tensor:
    """The mean over pairs, written pair by pair."""
    results = []
    for logprobs, fixed, lengths in zip(policy, reference, tokens, strict=True):
        better, worse = ((logprobs[k] - fixed[k]) / (lengths[k] if config.length_normalisation else 1) for k in (0, 1))
        if config.loss == "ipo":
            loss = (better - worse - 0.5 / config.beta) ** 2
        else:
            odds = config.beta * (better - worse)
            smooth = config.label_smoothing
            loss = (1 - smooth) * torch.log1p(torch.exp(-odds)) + smooth * torch.log1p(torch.exp(odds))
        results.append(loss - config.nll_coef * logprobs[0] / lengths[0])
    return torch.stack(results).mean()


def plain_kto(policy: Tensor, reference: Tensor, rewards: Tensor, config: KTOSettings) -> Tensor:
    """The mean over examples of lambda - v(x, y), written example by example."""
    kl = max(0.0, float((policy.detach()[:, 1] - reference[:, 1]).mean()))
    results = []
    for logprob, fixed, reward in zip(policy[:, 0], reference[:, 0], rewards[:, 0], strict=True):
        if reward > 0:
            value = config.desirable_weight / (1 + torch.exp(-config.beta * (logprob - fixed - kl)))
            results.append(config.desirable_weight - value)
        else:
            value = config.undesirable_weight / (1 + torch.exp(-config.beta * (kl - (logprob - fixed))))
            results.append(config.undesirable_weight - value)
    return torch.stack(results).mean()


@pytest.mark.parametrize(
    "own_settings",
    [
        {},
        {"beta": 0.5, "label_smoothing": 0.1},
        {"loss": "ipo", "beta": 0.2},
        {"length_normalisation": True, "nll_coef": 0.3},
        {"loss": "ipo", "length_normalisation": True},
    ],
)
def test_coefficients_of_pairs_are_the_gradient_of_the_plain_formula(own_settings: dict[str, Any]) -> None:
    config, given = DPOSettings(**own_settings), responses()
    result, judged = coefficients(given, dpo_loss, config)
    policy = given.policy.clone().requires_grad_()
    loss = plain_dpo(policy, given.reference, given.tokens, config)
    (expected,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    assert judged.losses.mean().item() == pytest.approx(loss.item(), rel=1e-12)
    assert result.count_nonzero() == result.numel()


@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_coefficients_of_examples_are_the_gradient_of_the_plain_formula(shift: float) -> None:
    """z0 above 0 or not. Responses to other prompts have no gradient."""
    config, given = KTOSettings(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7), responses()
    given = replace(given, reference=given.reference - shift)
    result, judged = coefficients(given, kto_loss, config)
    policy = given.policy.clone().requires_grad_()
    loss = plain_kto(policy, given.reference, given.rewards, config)
    (expected,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    assert judged.losses.mean().item() == pytest.approx(loss.item(), rel=1e-12)
    assert (judged.stats[metrics.PREFERENCE_Z0].item() > 0) == (shift > 0)
    assert result[:, 1].count_nonzero() == 0 and result[:, 0].count_nonzero() == len(result)


@pytest.mark.parametrize(("loss", "config"), [(dpo_loss, DPOSettings()), (kto_loss, KTOSettings())])
def test_a_response_is_made_likelier_where_it_is_good(loss: PreferenceLoss, config: Any) -> None:
    given = responses()
    result, _ = coefficients(given, loss, config)
    good = given.rewards[:, 0] > 0 if config.name == "kto" else torch.ones(len(result), dtype=torch.bool)
    assert (result[good, 0] < 0).all() and (result[~good, 0] > 0).all()


def test_the_loss_of_a_token_is_its_log_prob_by_the_coefficient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -0.25])
    columns = TokenColumns(logprobs, torch.zeros(2), advantages, torch.ones(2, dtype=torch.bool))
    loss = coefficient_loss(columns, DPOSettings())
    assert loss.loss.tolist() == [0.5, -0.5]
    (gradient,) = torch.autograd.grad(loss.loss.sum(), logprobs)
    assert gradient.tolist() == [-0.5, 0.25]  # whatever the policy of before was
