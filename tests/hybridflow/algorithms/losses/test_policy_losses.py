"""Losses of GSPO, CISPO, SAPO, Clip-Cov and KL-Cov: against the papers' formulas, and in any cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.policy import policy_gradient_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.metrics import names as metrics
from tests.support.columns import check_pieces_add_up, mask_with_holes, random_mask, soiled, token_weights

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.3},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.3},
    "cispo": {"weight_clip_low": 0.3, "weight_clip_high": 0.4},
    "sapo": {"gate_temperature_positive": 1.0, "gate_temperature_negative": 2.0},
    "clip_cov": {"clip_high": 0.28, "dual_clip": 2.0},
    "kl_cov": {"kl_cov_coef": 0.7},
}
SHARED = {"kl_coef": 0.1, "kl_estimator": "k3+", "entropy_coef": 0.01}


def settings_of(name: str, **others: Any) -> Any:
    return load(name).settings(**SETTINGS[name], **others)


def columns_of(mask: Tensor) -> dict[str, Tensor]:
    shape = mask.shape
    logprobs = -torch.rand(shape) * 3
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.5 * torch.randn(shape),
        "advantages": torch.randn(shape[0], 1).expand(shape).clone(),
        "entropy": torch.rand(shape),
        "ref_logprobs": logprobs + 0.2 * torch.randn(shape),
        "selected": (torch.rand(shape) < 0.3).float(),
        "sequences": torch.arange(shape[0])[:, None].expand(shape).clone(),
    }


def call(columns: dict[str, Tensor], weights: Tensor, config: AlgorithmSettings) -> tuple[Tensor, Statistics]:
    """Call the loss as the trainer does: sequences are numbered within their shard, and `selected` is where a loss
    reads it.
    """
    given = dict(columns)
    if config.name not in ("clip_cov", "kl_cov"):
        del given["selected"]
    numbers = given.pop("sequences").unique_consecutive(return_inverse=True)[1]
    loss = load(config.name).policy_loss
    return policy_gradient_loss(
        given.pop("logprobs"), weights=weights, config=config, policy_loss=loss, sequences=numbers, **given
    )


Rows = list[Tensor]
"""One sequence, (n,) float64 each: log-probs, old log-probs, advantages, mask of the chosen tokens."""


def plain_gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, chosen: Tensor, config: Any) -> Tensor:
    s = (logprobs.sum() - old.sum()).div(len(old)).exp()
    objective = torch.minimum(s * advantages, s.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages)
    return -objective.where(advantages >= 0, objective.maximum(config.dual_clip * advantages))


def plain_cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = (logprobs - old).exp().detach().clamp(1 - config.weight_clip_low, 1 + config.weight_clip_high)
    return -weights * advantages * logprobs


def plain_sapo(logprobs: Tensor, old: Tensor, advantages: Tensor, chosen: Tensor, config: Any) -> Tensor:
    tau = torch.tensor(
        [
            config.gate_temperature_positive if advantage > 0 else config.gate_temperature_negative
            for advantage in advantages.tolist()
        ],
        dtype=torch.float64,
    )
    return -4 / tau / (1 + (-tau * ((logprobs - old).exp() - 1)).exp()) * advantages


def plain_clip_cov(logprobs: Tensor, old: Tensor, advantages: Tensor, chosen: Tensor, config: Any) -> Tensor:
    ratio = (logprobs - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages)
    return -objective.where(advantages >= 0, objective.maximum(config.dual_clip * advantages)) * (1 - chosen)


def plain_kl_cov(logprobs: Tensor, old: Tensor, advantages: Tensor, chosen: Tensor, config: Any) -> Tensor:
    return -(logprobs - old).exp() * advantages + config.kl_cov_coef * chosen * (logprobs - old).abs()


PLAIN: dict[str, Callable[..., Tensor]] = {
    "gspo": plain_gspo,
    "gspo_token": plain_gspo,  # with one advantage for all tokens of a sequence
    "cispo": plain_cispo,
    "sapo": plain_sapo,
    "clip_cov": plain_clip_cov,
    "kl_cov": plain_kl_cov,
}


def plain_loss(name: str, columns: dict[str, Tensor], mask: Tensor, config: Any) -> Tensor:
    """Sequence by sequence, from the formulas in the papers."""
    names = ("logprobs", "old_logprobs", "advantages", "selected")
    losses = [
        PLAIN[name](*(columns[name][row][mask[row]] for name in names), config)
        for row in range(len(mask))
        if mask[row].any()
    ]
    if config.loss_aggregation == "token-mean":
        return torch.cat(losses).mean()
    return torch.stack([loss.mean() for loss in losses]).mean()


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_against_autograd_of_the_plain_formula(name: str, aggregation: str) -> None:
    torch.manual_seed(2)
    mask = mask_with_holes(8, 9)
    columns, config = columns_of(mask), settings_of(name, loss_aggregation=aggregation)
    exact = {key: column.double() for key, column in columns.items()}
    for given in (columns, exact):
        given["logprobs"].requires_grad_()
    loss, _ = call(columns, token_weights(mask, aggregation), config)  # type: ignore[arg-type]
    expected = plain_loss(name, exact, mask, config)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, columns["logprobs"])
    (requested,) = torch.autograd.grad(expected, exact["logprobs"])
    torch.testing.assert_close(gradient.double(), requested, rtol=1e-4, atol=1e-7)
    assert 0 < gradient.count_nonzero() <= mask.sum()


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_gradients_and_statistics_do_not_depend_on_the_cut(name: str) -> None:
    """Nor on whether sequences are rows of a micro-batch or packed into one dimension."""
    torch.manual_seed(3)
    mask = random_mask(12, 8)
    config = settings_of(name, **SHARED)
    cuts = []
    for seed in range(4):
        torch.manual_seed(seed)
        cuts.append(torch.randperm(12).tensor_split(sorted(torch.randperm(11)[:3].add(1).tolist())))
    columns, weights = columns_of(mask), token_weights(mask, config.loss_aggregation)
    merged = check_pieces_add_up(
        lambda given, weighted: call(given, weighted, config), columns, weights, "logprobs", cuts
    )
    assert metrics.TRAIN_ENTROPY in merged


@pytest.mark.parametrize("name", SETTINGS)
def test_prompts_and_padding_do_nothing_whatever_they_hold(name: str) -> None:
    """Nan, infinities and large numbers; rows, and packed as prompt and response end to end."""
    torch.manual_seed(4)
    mask = mask_with_holes(5, 8)
    config = settings_of(name, **SHARED)
    columns, weights = columns_of(mask), token_weights(mask, config.loss_aggregation)
    clean, clean_statistics = call(columns, weights, config)
    dirty = {key: column if key == "sequences" else soiled(column, mask) for key, column in columns.items()}
    for given, entry in (
        (dirty, weights),
        ({key: column.flatten() for key, column in dirty.items()}, weights.flatten()),
    ):
        logprobs = given["logprobs"].clone().requires_grad_()
        loss, stats = call({**given, "logprobs": logprobs}, entry, config)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss.item() == pytest.approx(clean.item(), rel=1e-6)
        assert stats.values() == pytest.approx(clean_statistics.values(), rel=1e-6)
        assert gradient.isfinite().all()
        assert gradient[entry == 0].count_nonzero() == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_on_the_first_policy_every_gradient_is_the_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    columns = {
        "logprobs": logprobs,
        "advantages": torch.tensor([3.0, 3.0, -0.5]),
        "selected": torch.zeros(3),
        "sequences": torch.tensor([0, 0, 1]),
    }
    weights = torch.tensor([0.25, 0.25, 0.5])
    loss, stats = call(columns, weights, settings_of(name))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -weights * columns["advantages"])
    assert stats.values()[metrics.TRAIN_RATIO] == 1.0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_huge_ratio_leaves_gradients_finite(name: str) -> None:
    logprobs = torch.tensor([-1.0, -200.0], requires_grad=True)
    columns = {
        "logprobs": logprobs,
        "old_logprobs": torch.tensor([-200.0, -1.0]),
        "advantages": torch.tensor([1.0, -1.0]),
        "selected": torch.ones(2),
        "sequences": torch.tensor([0, 1]),
    }
    loss, _ = call(columns, torch.full((2,), 0.5), settings_of(name))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.isfinite().all()


def one_sequence(name: str, log_ratios: list[float], advantage: float, **others: Any) -> tuple[float, list[float], Any]:
    """Loss, slopes by the log-probs, and figures of a sequence whose tokens count alike."""
    count = len(log_ratios)
    old = torch.full((count,), -3.0)
    logprobs = (old + torch.tensor(log_ratios)).requires_grad_()
    columns = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": torch.full((count,), advantage),
        "selected": torch.tensor([1.0] + [0.0] * (count - 1)),
        "sequences": torch.zeros(count, dtype=torch.int64),
    }
    config = load(name).settings(**others)
    loss, stats = call(columns, torch.full((count,), 1 / count), config)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), (logprobs.grad * count).tolist(), stats.values()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope"),
    [
        (1.05, 2.0, None, -2.1, -2.1),
        (1.5, 2.0, None, -2.6, 0.0),  # clipped above at 1.3
        (1.5, -2.0, None, 3.0, 3.0),
        (0.5, -2.0, None, 1.6, 0.0),  # clipped below at 0.8
        (0.5, 2.0, None, -1.0, -1.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clip: at most 3 * 2
        (2.0, -2.0, 3.0, 4.0, 4.0),
        (5.0, 2.0, 3.0, -2.6, 0.0),
    ],
)
def test_gspo_by_hand(
    name: str, ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float
) -> None:
    """The ratio is the geometric mean of the tokens', however they differ, and clips all of them or none."""
    third = math.log(ratio)
    result = one_sequence(
        name, [third - 0.4, third + 0.1, third + 0.3], advantage, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip
    )
    assert result[0] == pytest.approx(loss, rel=1e-5)
    assert result[1] == pytest.approx([slope] * 3, rel=1e-5)
    values = result[2]
    assert values[metrics.TRAIN_RATIO] == pytest.approx(ratio, rel=1e-5)
    clipped = sum(value for key, value in values.items() if "clip_fraction" in key)
    assert clipped == (slope == 0)


def test_the_token_form_gives_each_token_its_own_advantage() -> None:
    """GSPO's gradient is that of the mean ratio, with the mean advantage for every token."""
    slopes = {}
    for name in ("gspo", "gspo_token"):
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        columns = {
            "logprobs": logprobs,
            "old_logprobs": torch.tensor([-1.1, -1.9]),
            "advantages": torch.tensor([3.0, 1.0]),
            "selected": torch.zeros(2),
            "sequences": torch.zeros(2, dtype=torch.int64),
        }
        loss, _ = call(columns, torch.full((2,), 0.5), load(name).settings(clip_low=0.5, clip_high=0.5))
        assert loss.item() == pytest.approx(-2.0)  # a geometric mean ratio of 1
        slopes[name] = torch.autograd.grad(loss, logprobs)[0].tolist()
    assert slopes == {"gspo": pytest.approx([-1.0, -1.0]), "gspo_token": pytest.approx([-1.5, -0.5])}


def test_cispo_by_hand() -> None:
    """Weights are clipped; gradients never vanish."""
    ratios = [0.1, 1.0, 1.2, 9.0]
    for low, weights in ((None, [0.1, 1.0, 1.2, 1.5]), (0.3, [0.7, 1.0, 1.2, 1.5])):
        loss, slopes, values = one_sequence(
            "cispo", [math.log(ratio) for ratio in ratios], -2.0, weight_clip_low=low, weight_clip_high=0.5
        )
        assert slopes == pytest.approx([2 * weight for weight in weights], rel=1e-5)
        expected = sum(2 * weight * (math.log(ratio) - 3) for weight, ratio in zip(weights, ratios, strict=True)) / 4
        assert loss == pytest.approx(expected, rel=1e-5)
        assert values[metrics.TRAIN_CLIP_FRACTION_HIGH] == 0.25
        assert values[metrics.TRAIN_CLIP_FRACTION_LOW] == (0.0 if low is None else 0.25)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 4.0), (0.0, 4.0)])
def test_sapo_by_hand(advantage: float, tau: float) -> None:
    """At a ratio of 1 the gate is 2 / tau with a slope of 1; at 1 + ln 3 / tau, 3 / tau with a slope of 3/4."""
    ratio = 1 + math.log(3) / tau
    loss, slopes, values = one_sequence(
        "sapo", [0.0, math.log(ratio)], advantage, gate_temperature_positive=1.0, gate_temperature_negative=4.0
    )
    assert loss == pytest.approx(-advantage * (2 / tau + 3 / tau) / 2, rel=1e-5)
    assert slopes == pytest.approx([-advantage, -advantage * 0.75 * ratio], rel=1e-5)
    assert values[metrics.TRAIN_GATE_SLOPE] == pytest.approx((1 + 0.75) / 2, rel=1e-5)


def test_clip_cov_by_hand() -> None:
    """The chosen token, the first, has no gradient; the others are PPO's."""
    loss, slopes, values = one_sequence("clip_cov", [math.log(1.1), math.log(1.1), math.log(1.5)], 2.0)
    assert loss == pytest.approx(-(2.2 + 2.4) / 3, rel=1e-5)
    assert slopes == pytest.approx([0.0, -2.2, 0.0], rel=1e-5)
    assert values[metrics.TRAIN_SELECTED_FRACTION] == pytest.approx(1 / 3)
    assert values[metrics.TRAIN_CLIP_FRACTION_HIGH] == pytest.approx(1 / 3)
    _, slopes, _ = one_sequence("clip_cov", [0.0, math.log(5.0)], -1.0, dual_clip=3.0)
    assert slopes == [0.0, 0.0]


@pytest.mark.parametrize("sign", [1, -1])
def test_kl_cov_by_hand(sign: int) -> None:
    """The chosen token, the first, is pulled back to the old policy from either side; nothing is clipped."""
    ratio = math.exp(sign * 0.5)
    loss, slopes, values = one_sequence("kl_cov", [sign * 0.5, sign * 0.5], 2.0, kl_cov_coef=0.6)
    assert loss == pytest.approx(-2 * ratio + 0.6 * 0.5 / 2, rel=1e-5)
    assert slopes == pytest.approx([-2 * ratio + sign * 0.6, -2 * ratio], rel=1e-5)
    assert values[metrics.TRAIN_SELECTED_FRACTION] == 0.5
