"""The critic's loss: by hand, as a plain loop, by finite differences, and in pieces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.losses.value import explained_variance, value_loss, value_moments
from hybridflow.metrics.names import COST_CRITIC, CRITIC
from tests.support.columns import check_pieces_add_up, mask_with_holes, random_mask, soiled, token_weights


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (1.0, 0.0, 3.0, None, 2.0, -2.0),
        (1.0, 0.9, 3.0, 0.2, 2.0, -2.0),  # it has hardly moved
        (1.0, 0.0, 3.0, 0.2, 0.5 * 2.8**2, 0.0),  # moved far towards the return: no more
        (-1.0, 0.0, 3.0, 0.2, 8.0, -4.0),  # moved far away from it: back
        (9.0, 0.0, 3.0, 0.2, 18.0, 6.0),  # moved far past it, and now further away than before
        (4.0, 0.0, 3.0, 0.2, 0.5 * 2.8**2, 0.0),  # moved past it, but nearer than before
        (3.0, 3.0, 3.0, 0.2, 0.0, 0.0),
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, clip: float | None, loss: float, slope: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    columns: dict[str, Any] = {
        "old_values": torch.tensor([old]),
        "returns": torch.tensor([target]),
        "weights": torch.tensor([0.5]),
    }
    result, statistics = value_loss(values, clip=clip, **columns)
    result.backward()
    assert result.item() == pytest.approx(0.5 * loss, rel=1e-6)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(0.5 * slope, rel=1e-6)
    assert statistics.values() == {
        CRITIC.value_loss: pytest.approx(0.5 * loss, rel=1e-6),
        CRITIC.clip_fraction: float(slope == 0.0 and loss != 0.0),
        CRITIC.value_mean: value,
        CRITIC.return_mean: target,
    }


def columns_of(samples: int, width: int) -> dict[str, Tensor]:
    old = torch.randn(samples, width)
    return {
        "values": old + 0.4 * torch.randn(samples, width),
        "old_values": old,
        "returns": old + torch.randn(samples, width),
    }


def call(columns: dict[str, Tensor], weights: Tensor) -> tuple[Tensor, Statistics]:
    return value_loss(
        columns["values"], old_values=columns["old_values"], returns=columns["returns"], weights=weights, clip=0.2
    )


def plain_loss(values: list[float], old: list[float], targets: list[float], weights: list[float]) -> float:
    """The loss token by token in Python floats."""
    result = 0.0
    for value, before, target, weight in zip(values, old, targets, weights, strict=True):
        clipped = before + min(max(value - before, -0.2), 0.2)
        result += weight * 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
    return result


def test_value_loss_and_its_gradient_against_a_plain_loop() -> None:
    torch.manual_seed(0)
    columns = columns_of(5, 8)
    weights = token_weights(mask_with_holes(5, 8), "seq-mean-token-mean")
    columns["values"].requires_grad_()
    loss, _ = call(columns, weights)
    loss.backward()
    flat = {name: column.detach().flatten().tolist() for name, column in columns.items()}
    values, others = flat["values"], (flat["old_values"], flat["returns"], weights.flatten().tolist())
    assert loss.item() == pytest.approx(plain_loss(values, *others), rel=1e-5)
    step = 1e-6
    slopes = []
    for index, value in enumerate(values):
        above, below = ([*values[:index], value + sign * step, *values[index + 1 :]] for sign in (1, -1))
        slopes.append((plain_loss(above, *others) - plain_loss(below, *others)) / (2 * step))
    assert columns["values"].grad is not None
    assert columns["values"].grad.flatten().tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-7)


def test_value_loss_of_pieces_adds_up() -> None:
    torch.manual_seed(1)
    columns, mask = columns_of(12, 8), random_mask(12, 8)
    weights = token_weights(mask, "token-mean")
    shards = torch.randperm(12).tensor_split([1, 6, 9])  # in any order of rows
    merged = check_pieces_add_up(call, columns, weights, "values", [shards])
    assert 0 < merged[CRITIC.clip_fraction] < 1


def test_tokens_of_weight_zero_do_nothing_whatever_they_hold() -> None:
    torch.manual_seed(2)
    columns, mask = columns_of(4, 6), mask_with_holes(4, 6)
    weights = token_weights(mask, "token-mean")
    clean, clean_statistics = call(columns, weights)
    dirty = {name: soiled(column, mask).requires_grad_() for name, column in columns.items()}
    loss, statistics = call(dirty, weights)
    (gradient,) = torch.autograd.grad(loss, dirty["values"])
    assert loss.item() == clean.item()
    assert statistics.values() == clean_statistics.values()
    assert gradient.isfinite().all()
    assert gradient[~mask].count_nonzero() == 0


def test_a_piece_without_a_counted_token_is_zero_and_backward_runs() -> None:
    values = torch.tensor([float("nan")], requires_grad=True)
    loss, statistics = value_loss(
        values, old_values=torch.ones(1), returns=torch.ones(1), weights=torch.zeros(1), clip=0.2
    )
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None
    assert values.grad.item() == 0.0
    assert statistics.values() == {CRITIC.value_loss: 0.0}


def test_a_column_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"value_loss: returns has shape \(3,\), weights \(2,\)"):
        value_loss(torch.zeros(2), old_values=torch.zeros(2), returns=torch.zeros(3), weights=torch.ones(2), clip=None)


def test_statistics_of_a_cost_critic_have_names_of_their_own() -> None:
    one = torch.ones(1)
    _, statistics = value_loss(one, old_values=one, returns=3 * one, weights=one, clip=None, names=COST_CRITIC)
    values = statistics.values()
    assert values["cost_critic/value_loss"] == 2.0 and values["cost_critic/return_mean"] == 3.0
    assert all(name.startswith("cost_critic/") for name in values)


def explained(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Explained variance of a batch in three shards."""
    rows = torch.arange(len(mask)).tensor_split([1, 4])
    return explained_variance(value_moments(values[some], returns[some], mask[some]) for some in rows)


def test_explained_variance() -> None:
    torch.manual_seed(3)
    mask = mask_with_holes(6, 9)
    returns, noise = torch.randn(6, 9), torch.randn(6, 9)
    assert explained(soiled(returns, mask), soiled(returns, mask), mask) == 1.0
    assert explained(returns + 5, returns, mask) == pytest.approx(1.0, abs=1e-6)
    assert explained(torch.full_like(returns, 3.0), returns, mask) == pytest.approx(0.0, abs=1e-6)
    expected = 1 - (noise[mask].double().var() / returns[mask].double().var()).item()
    assert explained(returns + noise, returns, mask) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(explained(noise, torch.ones(6, 9), mask))
