"""The loss of a policy around the clipped surrogate, by hand and as a plain loop."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import TokenColumns, sequence_means, sequence_sums
from hybridflow.algorithms.losses.policy import policy_gradient_loss as any_policy_gradient_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.metrics import names as metrics
from tests.support.columns import MODES, check_pieces_add_up, random_mask, token_weights

policy_gradient_loss = partial(any_policy_gradient_loss, policy_loss=clipped_loss)


CONFIG = GRPOSettings(kl_coef=0.1, entropy_coef=0.01, clip_high=0.28, dual_clip=3.0)


def random_columns(samples: int, width: int) -> dict[str, Tensor]:
    logprobs = -torch.rand(samples, width) * 3
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(samples, width),
        "advantages": torch.randn(samples, 1).expand(samples, width).clone(),
        "entropy": torch.rand(samples, width),
        "ref_logprobs": logprobs + 0.2 * torch.randn(samples, width),
        "rollout_logprobs": logprobs + 0.01 * torch.randn(samples, width),
    }


def call(columns: dict[str, Tensor], weights: Tensor, config: GRPOSettings) -> tuple[Tensor, Statistics]:
    others: dict[str, Any] = {name: column for name, column in columns.items() if name != "logprobs"}
    return policy_gradient_loss(columns["logprobs"], weights=weights, config=config, **others)


def naive_loss(columns: dict[str, Tensor], mask: Tensor, config: GRPOSettings, mode: str, length: int | None) -> float:
    """The loss sample by sample and token by token in Python floats, from the formulas in the papers."""
    per_sequence = []
    for row in range(mask.shape[0]):
        losses = []
        for t in range(mask.shape[1]):
            if not mask[row, t]:
                continue
            new, old, advantage, entropy, reference = (
                columns[name][row, t].item()
                for name in ("logprobs", "old_logprobs", "advantages", "entropy", "ref_logprobs")
            )
            ratio = math.exp(new - old)
            objective = min(ratio * advantage, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage)
            if advantage < 0 and config.dual_clip is not None:
                objective = max(objective, config.dual_clip * advantage)
            kl = math.exp(reference - new) - (reference - new) - 1
            losses.append(-objective + config.kl_coef * kl - config.entropy_coef * entropy)
        if losses:
            per_sequence.append(losses)
    if mode == "token-mean":
        return statistics.fmean([loss for losses in per_sequence for loss in losses])
    if mode == "seq-mean-token-mean":
        return statistics.fmean([statistics.fmean(losses) for losses in per_sequence])
    return statistics.fmean([sum(losses) / (length or 1) for losses in per_sequence])


@pytest.mark.parametrize(("mode", "length"), MODES)
def test_policy_gradient_loss_against_a_plain_loop(mode: AggregationMode, length: int | None) -> None:
    torch.manual_seed(2)
    columns, mask = random_columns(6, 9), random_mask(6, 9)
    loss, _ = call(columns, token_weights(mask, mode, normalising_length=length), CONFIG)
    assert loss.item() == pytest.approx(naive_loss(columns, mask, CONFIG, mode, length), rel=1e-5)


def test_the_gradient_against_finite_differences_of_the_plain_loop() -> None:
    torch.manual_seed(5)
    columns, mask = random_columns(4, 5), random_mask(4, 5)
    columns["logprobs"].requires_grad_()
    loss, _ = call(columns, token_weights(mask, "token-mean"), CONFIG)
    (gradient,) = torch.autograd.grad(loss, columns["logprobs"])
    exact = {name: column.detach().double() for name, column in columns.items()}
    step = 1e-6
    for position in mask.nonzero().unbind():
        moved = torch.zeros(4, 5, dtype=torch.float64)
        moved[tuple(position)] = step
        above, below = (
            naive_loss(exact | {"logprobs": exact["logprobs"] + shift}, mask, CONFIG, "token-mean", None)
            for shift in (moved, -moved)
        )
        assert gradient[tuple(position)].item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)
    assert gradient[~mask].count_nonzero() == 0


@pytest.mark.parametrize(("mode", "length"), MODES)
def test_loss_gradients_and_statistics_do_not_depend_on_the_cut(mode: AggregationMode, length: int | None) -> None:
    torch.manual_seed(3)
    columns, mask = random_columns(12, 8), random_mask(12, 8)
    weights = token_weights(mask, mode, normalising_length=length)
    cuts = []
    for seed in range(4):
        torch.manual_seed(seed)
        sizes = sorted(torch.randperm(11)[:3].add(1).tolist())
        cuts.append(torch.randperm(12).tensor_split(sizes))
    check_pieces_add_up(lambda given, weighted: call(given, weighted, CONFIG), columns, weights, "logprobs", cuts)


def test_policy_statistics_by_hand() -> None:
    weights = torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25])
    ratios = torch.tensor([1.0, 1.5, 7.0, 0.5, 1.1])
    loss, stats = policy_gradient_loss(
        torch.zeros(5),
        old_logprobs=-ratios.log(),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        rollout_logprobs=-ratios.log() + torch.tensor([0.1, -0.3, 9.0, 0.0, 0.0]),
        weights=weights,
        config=GRPOSettings(),
    )
    values = stats.values()
    assert values[metrics.TRAIN_LOSS] == pytest.approx((-1.0 - 1.2 + 0.8 + 1.1) / 4, rel=1e-6)
    assert loss.item() == pytest.approx(values[metrics.TRAIN_LOSS])
    assert values[metrics.TRAIN_RATIO] == pytest.approx((1.0 + 1.5 + 0.5 + 1.1) / 4)
    assert values[metrics.TRAIN_CLIP_FRACTION_HIGH] == 0.25
    assert values[metrics.TRAIN_CLIP_FRACTION_LOW] == 0.25
    assert values[metrics.TRAIN_KL_K1] == pytest.approx(-math.log(1.5 * 0.5 * 1.1) / 4, rel=1e-5)
    assert values[metrics.TRAIN_KL_K3] == pytest.approx(
        sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.1)) / 4, rel=1e-5
    )
    assert values[metrics.MISMATCH_LOGPROB_MEAN] == pytest.approx(0.1, rel=1e-5)
    assert values[metrics.MISMATCH_LOGPROB_MAX] == pytest.approx(0.3, rel=1e-5)
    assert metrics.TRAIN_ENTROPY not in values


def test_tokens_of_weight_zero_do_nothing_whatever_they_hold() -> None:
    torch.manual_seed(4)
    columns, mask = random_columns(4, 6), random_mask(4, 6)
    mask[1, 2:] = False
    weights = token_weights(mask, "token-mean")
    clean, clean_statistics = call(columns, weights, CONFIG)
    dirty = {name: column.masked_fill(~mask, float("nan")).requires_grad_() for name, column in columns.items()}
    loss, stats = call(dirty, weights, CONFIG)
    (gradient,) = torch.autograd.grad(loss, dirty["logprobs"])
    assert loss.item() == clean.item()
    assert stats.values() == clean_statistics.values()
    assert gradient.isfinite().all()
    assert gradient[~mask].count_nonzero() == 0


def test_without_old_logprobs_the_gradient_is_that_of_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages_ = torch.tensor([3.0, -0.5])
    weights = torch.tensor([0.5, 0.5])
    loss, stats = policy_gradient_loss(logprobs, advantages=advantages_, weights=weights, config=GRPOSettings())
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -weights * advantages_)
    assert stats.values()[metrics.TRAIN_RATIO] == 1.0


def test_a_micro_batch_without_a_counted_token_is_zero_and_backward_runs() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, stats = policy_gradient_loss(
        logprobs,
        advantages=torch.ones(1),
        weights=torch.zeros(1),
        rollout_logprobs=torch.zeros(1),
        config=GRPOSettings(),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert stats.values() == {metrics.TRAIN_POLICY_LOSS: 0.0, metrics.TRAIN_LOSS: 0.0}


def test_columns_that_the_config_needs_are_asked_for() -> None:
    base: dict[str, Any] = {"advantages": torch.ones(2), "weights": torch.ones(2)}
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        policy_gradient_loss(torch.zeros(2), config=GRPOSettings(kl_coef=0.1), **base)
    with pytest.raises(ValueError, match="needs entropy"):
        policy_gradient_loss(torch.zeros(2), config=GRPOSettings(entropy_coef=0.1), **base)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(3,\), weights \(2,\)"):
        policy_gradient_loss(torch.zeros(2), old_logprobs=torch.zeros(3), config=GRPOSettings(), **base)


def test_an_entropy_that_is_no_number_only_reaches_a_loss_that_asks_for_it() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns: dict[str, Any] = {"advantages": torch.ones(2), "weights": torch.full((2,), 0.5)}
    columns["entropy"] = torch.tensor([1.0, torch.nan])
    for coefficient, finite in ((0.0, True), (0.1, False)):
        loss, stats = policy_gradient_loss(logprobs, config=GRPOSettings(entropy_coef=coefficient), **columns)
        assert math.isfinite(loss.item()) == finite
        assert math.isnan(stats.values()[metrics.TRAIN_ENTROPY])


def test_tokens_at_the_limit_of_the_penalty_are_counted() -> None:
    reference: dict[str, Any] = {"ref_logprobs": torch.tensor([17.0, -1.5, -2.0, 0.0])}
    columns: dict[str, Any] = {"advantages": torch.zeros(4), "weights": torch.tensor([0.5, 0.25, 0.25, 0.0])}
    for estimator, expected in (("k3", 1 / 3), ("k2", None)):
        config = GRPOSettings(kl_coef=0.1, kl_estimator=estimator)
        _, loss = policy_gradient_loss(torch.full((4,), -1.0), config=config, **columns, **reference)
        assert loss.values().get(metrics.TRAIN_REFERENCE_KL_CAPPED) == pytest.approx(expected)


def test_means_of_sequences_by_hand_and_their_gradient() -> None:
    column = torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0, torch.nan], requires_grad=True)
    tokens = TokenColumns(
        column,
        column,
        column,
        loss_mask=torch.tensor([True, True, False, True, False, False]),
        sequences=torch.tensor([0, 0, 0, 1, 1, 2]),
    )
    assert sequence_sums(column, tokens).tolist() == [3.0, 4.0, 0.0]
    means = sequence_means(column, tokens)
    assert means.tolist() == [1.5, 1.5, 1.5, 4.0, 4.0, 0.0]
    means[:2].sum().backward()
    assert column.grad is not None
    assert column.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    view, numbers = column.view(2, 3), torch.tensor([[0, 0, 0], [1, 1, 1]])
    rows = TokenColumns(view, view, view, tokens.loss_mask.view(2, 3), numbers)
    assert sequence_means(column.view(2, 3), rows).tolist() == [[1.5] * 3, [4.0] * 3]


def test_sequences_and_other_columns_are_asked_for_by_name() -> None:
    zeros = torch.zeros(2)
    tokens = TokenColumns(zeros, zeros, zeros, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="no column sequences"):
        sequence_means(torch.zeros(2), tokens)
    with pytest.raises(ValueError, match="no column selected"):
        tokens.column("selected")
