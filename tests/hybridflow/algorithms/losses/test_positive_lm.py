"""The language-model loss of right responses, by hand and against autograd of the plain formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import vapo
from hybridflow.algorithms.losses.aggregation import AggregationMode, sequence_weights
from hybridflow.algorithms.losses.policy import policy_gradient_loss
from hybridflow.algorithms.losses.positive_lm import positive_weights
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.vapo import VAPOSettings
from hybridflow.metrics import names as metrics
from tests.support.columns import MODES, check_pieces_add_up, random_mask, soiled

REWARDS = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.0])


def call(columns: dict[str, Tensor], weights: Tensor, config: VAPOSettings) -> tuple[Tensor, Statistics]:
    others = {name: column for name, column in columns.items() if name != "logprobs"}
    return policy_gradient_loss(
        columns["logprobs"], weights=weights, config=config, policy_loss=vapo.ALGORITHM.policy_loss, **others
    )


def some_columns(mode: AggregationMode, length: int | None) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Columns, weights and mask of six rows."""
    mask = random_mask(6, 7)
    mask[4] = torch.tensor([True, False, True, True, False, False, True])
    counts = mask.sum(1)
    weights = sequence_weights(counts, mode, normalising_length=length)
    lm = positive_weights(REWARDS, counts, weights, right_above=0.0)
    logprobs = -torch.rand(6, 7) * 3
    columns = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(6, 7),
        "advantages": torch.randn(6, 7),
        "lm_weights": lm[:, None] * mask,
    }
    return columns, weights[:, None] * mask, mask


def settings(mode: AggregationMode, length: int | None, coefficient: float = 0.1) -> VAPOSettings:
    return VAPOSettings(
        loss_aggregation=mode, loss_normalising_length=length, positive_lm_coef=coefficient, dual_clip=3.0
    )


def test_weights_by_hand() -> None:
    counts = torch.tensor([2, 5, 3, 4, 0, 1])
    weights = torch.full((6,), 1 / 15)
    result = positive_weights(REWARDS, counts, weights, right_above=0.0)
    assert result.tolist() == pytest.approx([15 / 5, 0, 15 / 5, 0, 0, 0])  # 5 tokens of right responses
    assert positive_weights(REWARDS, counts, weights, right_above=0.5).tolist() == pytest.approx(
        [15 / 2, 0, 0, 0, 0, 0]
    )
    assert positive_weights(REWARDS, counts, weights, right_above=9.0).tolist() == [0.0] * 6
    with pytest.raises(ValueError, match="counts has shape"):
        positive_weights(REWARDS, counts[:2], weights, right_above=0.0)


@pytest.mark.parametrize(("mode", "length"), MODES)
def test_loss_and_gradient_are_those_of_the_papers_formula(mode: AggregationMode, length: int | None) -> None:
    """Whatever the aggregation, the second term is the mean over the tokens of right responses."""
    torch.manual_seed(4)
    columns, weights, mask = some_columns(mode, length)
    columns["logprobs"].requires_grad_()
    loss, stats = call(columns, weights, settings(mode, length))
    (gradient,) = torch.autograd.grad(loss, columns["logprobs"])

    exact = columns["logprobs"].detach().double().requires_grad_()
    ratio = (exact - columns["old_logprobs"].double()).exp()
    advantages = columns["advantages"].double()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    surrogate = torch.where(advantages < 0, torch.maximum(surrogate, 3 * advantages), surrogate)
    per_row = torch.stack([(surrogate[row] * mask[row]).sum() for row in range(6)])
    counts, rows = mask.sum(1), int((mask.sum(1) > 0).sum())
    ppo = {
        "token-mean": per_row.sum() / counts.sum(),
        "seq-mean-token-sum": per_row.sum() / rows,
        "seq-mean-token-mean": (per_row / counts.clamp(min=1)).sum() / rows,
        "seq-mean-token-sum-norm": per_row.sum() / (rows * (length or 1)),
    }[mode]
    right = mask & (REWARDS > 0)[:, None]
    nll = -exact[right].mean()
    (-ppo + 0.1 * nll).backward()
    assert exact.grad is not None
    assert loss.item() == pytest.approx((-ppo + 0.1 * nll).item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-7)
    values = stats.values()
    assert values[metrics.TRAIN_POSITIVE_SHARE] == pytest.approx(int(right.sum()) / int(mask.sum()))
    assert values[metrics.TRAIN_POSITIVE_NLL] / values[metrics.TRAIN_POSITIVE_SHARE] == pytest.approx(
        nll.item(), rel=1e-5
    )


@pytest.mark.parametrize(("mode", "length"), MODES)
def test_pieces_packed_or_not_add_up_and_what_does_not_count_does_nothing(
    mode: AggregationMode, length: int | None
) -> None:
    torch.manual_seed(5)
    columns, weights, mask = some_columns(mode, length)
    columns["advantages"] = -columns["advantages"].abs()  # sums that do not cancel, and keep their digits
    clean, _ = call(columns, weights, settings(mode, length))
    dirty = {name: soiled(column, mask) for name, column in columns.items()}
    soiled_loss, _ = call(dirty, weights, settings(mode, length))
    assert soiled_loss.item() == clean.item()
    cuts = [torch.tensor([3, 0, 5, 1, 4, 2]).tensor_split(at) for at in ([1], [2, 3], [1, 4, 5])]
    check_pieces_add_up(
        lambda given, weighted: call(given, weighted, settings(mode, length)), columns, weights, "logprobs", cuts
    )


def test_without_a_coefficient_or_right_responses_it_is_the_clipped_surrogate() -> None:
    torch.manual_seed(6)
    columns, weights, _ = some_columns("token-mean", None)
    lm = columns.pop("lm_weights")
    plain, stats = call(columns, weights, settings("token-mean", None, 0.0))
    assert metrics.TRAIN_POSITIVE_NLL not in stats.values()
    none_right, stats = call(columns | {"lm_weights": torch.zeros_like(lm)}, weights, settings("token-mean", None))
    assert none_right.item() == plain.item()
    assert stats.values()[metrics.TRAIN_POSITIVE_SHARE] == 0
    with pytest.raises(ValueError, match="no column lm_weights"):
        call(columns, weights, settings("token-mean", None))
    assert math.isfinite(plain.item())
