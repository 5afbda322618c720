"""Effect of a correction's weights on the loss, for any token loss."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.corrections.settings import CorrectionSettings
from hybridflow.algorithms.corrections.weights import correct, log_ratios
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import PolicyLoss, PolicyLossFunction, TokenColumns, policy_gradient_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.metrics import names as metrics
from tests.support.columns import MODES, check_pieces_add_up, random_mask, soiled, token_weights

CONFIG = GRPOSettings(kl_coef=0.1, entropy_coef=0.01, clip_high=0.28, dual_clip=3.0)


def plain_gradient(columns: TokenColumns, config: object) -> PolicyLoss:
    """A loss of tokens that has no ratio."""
    return PolicyLoss(-columns.logprobs * columns.advantages, torch.ones_like(columns.logprobs))


def random_columns(samples: int, width: int) -> dict[str, Tensor]:
    logprobs = -torch.rand(samples, width) * 3
    old = logprobs + 0.3 * torch.randn(samples, width)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": torch.randn(samples, 1).expand(samples, width).clone(),
        "entropy": torch.rand(samples, width),
        "ref_logprobs": logprobs + 0.2 * torch.randn(samples, width),
        "rollout_logprobs": old + 0.3 * torch.randn(samples, width),
    }


def with_correction(columns: dict[str, Tensor], mask: Tensor, settings: CorrectionSettings) -> dict[str, Tensor]:
    """The columns with those weights that the correction gives the rows."""
    lengths = torch.full((len(mask),), mask.shape[1])
    old, rollout = (columns[name].flatten() for name in ("old_logprobs", "rollout_logprobs"))
    ratios = log_ratios(old, rollout, mask.flatten())
    return columns | {"correction_weights": correct(ratios, mask.flatten(), lengths, settings).weights.view_as(mask)}


def call(
    columns: dict[str, Tensor], weights: Tensor, policy_loss: PolicyLossFunction = clipped_loss
) -> tuple[Tensor, Statistics]:
    others = {name: column for name, column in columns.items() if name != "logprobs"}
    return policy_gradient_loss(columns["logprobs"], weights=weights, config=CONFIG, policy_loss=policy_loss, **others)


SETTINGS = [
    CorrectionSettings(weights="token", truncate=1.2),
    CorrectionSettings(weights="sequence", truncate=2.0, mask="token", mask_low=0.6, mask_high=1.7),
    CorrectionSettings(mask="geometric", mask_low=0.9, mask_high=1.1, veto=0.5),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("policy_loss", [clipped_loss, plain_gradient])
@pytest.mark.parametrize(("mode", "length"), MODES)
def test_only_the_policy_loss_is_weighed_and_the_gradient_is_that_of_the_formula(
    settings: CorrectionSettings, policy_loss: PolicyLossFunction, mode: AggregationMode, length: int | None
) -> None:
    torch.manual_seed(4)
    mask = random_mask(6, 7)
    columns = with_correction(random_columns(6, 7), mask, settings)
    weights = token_weights(mask, mode, normalising_length=length)
    columns["logprobs"].requires_grad_()
    loss, stats = call(columns, weights, policy_loss)
    (gradient,) = torch.autograd.grad(loss, columns["logprobs"])

    exact = {name: column.detach().double() for name, column in columns.items()}
    learned = exact["logprobs"].requires_grad_()
    corrected = exact["correction_weights"] * plain_or_clipped(learned, exact, policy_loss)
    difference = exact["ref_logprobs"] - learned
    penalties = CONFIG.kl_coef * (difference.exp() - 1 - difference) - CONFIG.entropy_coef * exact["entropy"]
    # The weights of the aggregation count every token, also those that the correction leaves out.
    expected = (weights.double() * (corrected + penalties)).sum()
    (expected_gradient,) = torch.autograd.grad(expected, learned)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-7)
    policy = (weights.double() * corrected).sum().item()
    assert stats.values()[metrics.TRAIN_POLICY_LOSS] == pytest.approx(policy, rel=1e-5, abs=1e-7)


def plain_or_clipped(logprobs: Tensor, columns: dict[str, Tensor], policy_loss: PolicyLossFunction) -> Tensor:
    advantages = columns["advantages"]
    if policy_loss is plain_gradient:
        return -logprobs * advantages
    ratio = (logprobs - columns["old_logprobs"]).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CONFIG.clip_low, 1 + CONFIG.clip_high) * advantages)
    assert CONFIG.dual_clip is not None
    return -torch.where(advantages < 0, torch.maximum(objective, CONFIG.dual_clip * advantages), objective)


@pytest.mark.parametrize("settings", SETTINGS)
def test_loss_gradients_and_statistics_do_not_depend_on_the_cut(settings: CorrectionSettings) -> None:
    torch.manual_seed(3)
    mask = random_mask(12, 8)
    columns = with_correction(random_columns(12, 8), mask, settings)
    cuts = []
    for seed in range(3):
        torch.manual_seed(seed)
        cuts.append(torch.randperm(12).tensor_split(sorted(torch.randperm(11)[:3].add(1).tolist())))
    check_pieces_add_up(partial(call), columns, token_weights(mask, "token-mean"), "logprobs", cuts)


def test_weights_of_one_change_no_bit() -> None:
    torch.manual_seed(1)
    mask = random_mask(5, 6)
    weights = token_weights(mask, "token-mean")
    results = []
    for correction in (None, mask.float()):
        torch.manual_seed(2)
        columns = random_columns(5, 6)
        columns["logprobs"].requires_grad_()
        given = columns if correction is None else columns | {"correction_weights": correction}
        loss, stats = call(given, weights)
        results.append((loss, torch.autograd.grad(loss, columns["logprobs"])[0], stats.values()))
    (loss, gradient, values), (again, gradient_again, values_again) = results
    assert torch.equal(loss, again) and torch.equal(gradient, gradient_again) and values == values_again


def test_a_token_that_is_left_out_has_no_gradient_of_the_policy_loss_whatever_its_ratio() -> None:
    columns = {
        "logprobs": torch.tensor([-1.0, -90.0, -1.0], requires_grad=True),
        "old_logprobs": torch.tensor([-1.0, -1.0, -90.0]),
        "advantages": torch.tensor([1.0, -1.0, -1.0]),
        "correction_weights": torch.tensor([0.5, 0.0, 0.0]),
    }
    config = GRPOSettings()
    others = {name: column for name, column in columns.items() if name != "logprobs"}
    weights = torch.full((3,), 1 / 3)
    loss, _ = policy_gradient_loss(
        columns["logprobs"], weights=weights, config=config, policy_loss=clipped_loss, **others
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 / 3)
    assert columns["logprobs"].grad is not None
    assert columns["logprobs"].grad.tolist() == pytest.approx([-0.5 / 3, 0.0, 0.0])


def test_weights_outside_the_mask_are_not_read() -> None:
    torch.manual_seed(6)
    mask = random_mask(4, 6)
    columns = with_correction(random_columns(4, 6), mask, SETTINGS[0])
    weights = token_weights(mask, "token-mean")
    clean, _ = call(columns, weights)
    dirty, _ = call(columns | {"correction_weights": soiled(columns["correction_weights"], mask)}, weights)
    assert torch.equal(clean, dirty)
