"""The loss of every actor but those that learn from pairs: against autograd of the plain formula, and in any cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.losses.policy import policy_gradient_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.registry import ALGORITHMS
from tests.hybridflow.algorithms.losses.test_policy_losses import PLAIN
from tests.support.columns import MODES, check_pieces_add_up, mask_with_holes, token_weights

ROLLED_OUT = [name for name in ALGORITHMS if load(name).preference_loss is None]
KL, ENTROPY = 0.1, 0.02
NEEDED = {
    "clip_cov": ("selected",),
    "kl_cov": ("selected",),
    "vapo": ("lm_weights",),
    "distillation": ("teacher_logprobs", "teacher_agrees"),
}
"""Columns of one algorithm."""
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"weight_clip_low": 0.3, "weight_clip_high": 0.4},
    "vapo": {"positive_lm_coef": 0.3},
}


def settings_of(name: str, estimator: KLEstimator = "k3", **others: Any) -> Any:
    settings = load(name).settings
    shared = {"kl_coef": KL, "kl_in": "loss", "kl_estimator": estimator, "entropy_coef": ENTROPY}
    if "dual_clip" in settings.model_fields:
        shared["dual_clip"] = 1.3
    return settings(**{**shared, **SETTINGS.get(name, {}), **others})


def columns_of(mask: Tensor) -> dict[str, Tensor]:
    shape = mask.shape
    logprobs = -torch.rand(shape) * 3
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.5 * torch.randn(shape),
        "advantages": torch.randn(shape[0], 1).expand(shape).clone(),
        "entropy": torch.rand(shape),
        "ref_logprobs": logprobs + 0.4 * torch.randn(shape),
        "correction_weights": 2 * torch.rand(shape) * (torch.rand(shape) < 0.8),
        "selected": (torch.rand(shape) < 0.3).float(),
        "lm_weights": torch.rand(shape[0], 1).expand(shape) * (torch.rand(shape[0], 1) < 0.5),
        "teacher_logprobs": logprobs + 0.5 * torch.randn(shape),
        "teacher_agrees": (torch.rand(shape) < 0.3).float(),
        "sequences": torch.arange(shape[0])[:, None].expand(shape).clone(),
    }


def call(name: str, columns: dict[str, Tensor], weights: Tensor, config: Any) -> tuple[Tensor, Statistics]:
    """Call the loss as the trainer does: with the columns that this algorithm has."""
    spare = {entry for other in NEEDED.values() for entry in other} - set(NEEDED.get(name, ()))
    given = {key: column for key, column in columns.items() if key not in spare}
    numbers = given.pop("sequences").unique_consecutive(return_inverse=True)[1]
    return policy_gradient_loss(
        given.pop("logprobs"),
        weights=weights,
        config=config,
        policy_loss=load(name).policy_loss,
        sequences=numbers,
        **given,
    )


def plain_clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, others: dict[str, Tensor], config: Any) -> Tensor:
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -objective.where(advantages >= 0, objective.maximum(config.dual_clip * advantages))


def plain_reinforce(
    logprobs: Tensor, old: Tensor, advantages: Tensor, others: dict[str, Tensor], config: Any
) -> Tensor:
    return -advantages * logprobs


def plain_vapo(logprobs: Tensor, old: Tensor, advantages: Tensor, others: dict[str, Tensor], config: Any) -> Tensor:
    clipped = plain_clipped(logprobs, old, advantages, others, config)
    return clipped - config.positive_lm_coef * others["lm_weights"] * logprobs


def plain_distillation(
    logprobs: Tensor, old: Tensor, advantages: Tensor, others: dict[str, Tensor], config: Any
) -> Tensor:
    return plain_clipped(logprobs, old, advantages + others["teacher_logprobs"] - old, others, config)


def plain_gspo_token(
    logprobs: Tensor, old: Tensor, advantages: Tensor, others: dict[str, Tensor], config: Any
) -> Tensor:
    """Gradient of each token alone, also where a correction weighs tokens of a sequence differently."""
    s = ((logprobs - old).mean().exp().detach() * logprobs.exp() / logprobs.exp().detach()).log()
    return plain_clipped(s, torch.zeros_like(s), advantages, others, config)


def with_selection(name: str) -> Callable[..., Tensor]:
    def plain(logprobs: Tensor, old: Tensor, advantages: Tensor, others: dict[str, Tensor], config: Any) -> Tensor:
        return PLAIN[name](logprobs, old, advantages, others["selected"], config)

    return plain


FORMULAS: dict[str, Callable[..., Tensor]] = {
    **{name: with_selection(name) for name in PLAIN},
    "gspo_token": plain_gspo_token,
    "gpg": plain_reinforce,
    "opo": plain_reinforce,
    "vapo": plain_vapo,
    "distillation": plain_distillation,
}
"""Formulas of the algorithms whose loss is not the clipped surrogate."""


def plain_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL penalty with the estimator's gradient. k1+ and k3+ have the gradient of k2 and another value."""
    difference = reference - logprobs
    if estimator == "k3":
        return difference.exp() - 1 - difference
    return difference**2 / 2


def plain_loss(
    name: str, columns: dict[str, Tensor], mask: Tensor, config: Any, mode: str, length: int | None
) -> Tensor:
    """Sequence by sequence, from the formulas in the papers."""
    formula, losses = FORMULAS.get(name, plain_clipped), []
    for row in range(len(mask)):
        if not mask[row].any():
            continue
        row_columns = {key: column[row][mask[row]] for key, column in columns.items()}
        policy = formula(
            row_columns["logprobs"], row_columns["old_logprobs"], row_columns["advantages"], row_columns, config
        )
        kl = plain_kl(row_columns["logprobs"], row_columns["ref_logprobs"], config.kl_estimator)
        losses.append(row_columns["correction_weights"] * policy + KL * kl - ENTROPY * row_columns["entropy"])
    match mode:
        case "token-mean":
            return torch.cat(losses).mean()
        case "seq-mean-token-mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
        case _:
            return torch.stack([loss.sum() for loss in losses]).mean() / (length or 1)


def test_all_others_have_the_clipped_surrogate() -> None:
    assert {name for name in ROLLED_OUT if load(name).policy_loss is not clipped_loss} == set(FORMULAS)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "length"), MODES)
@pytest.mark.parametrize("name", ROLLED_OUT)
def test_loss_and_gradient_against_autograd_of_the_plain_formula(name: str, mode: str, length: int | None) -> None:
    """Every term of a recipe, in every aggregation."""
    torch.manual_seed(6)
    mask = mask_with_holes(7, 8)
    columns, config = columns_of(mask), settings_of(name)
    exact = {key: column.double() for key, column in columns.items()}
    for given in (columns, exact):
        given["logprobs"].requires_grad_()
        given["entropy"].requires_grad_()
    weights = token_weights(mask, mode, normalising_length=length)  # type: ignore[arg-type]
    loss, _ = call(name, columns, weights, config)
    expected = plain_loss(name, exact, mask, config, mode, length)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    learned = ("logprobs", "entropy")
    gradient = torch.autograd.grad(loss, [columns[key] for key in learned])
    requested = torch.autograd.grad(expected, [exact[key] for key in learned])
    for one, other in zip(gradient, requested, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-7)
        assert one[mask].count_nonzero() == mask.sum()


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1+", "k3+"])
def test_the_gradient_with_every_estimator(estimator: KLEstimator) -> None:
    torch.manual_seed(7)
    mask = mask_with_holes(5, 6)
    columns, config = columns_of(mask), settings_of("grpo", estimator)
    exact = {key: column.double() for key, column in columns.items()}
    for given in (columns, exact):
        given["logprobs"].requires_grad_()
    loss, _ = call("grpo", columns, token_weights(mask, "token-mean"), config)
    (gradient,) = torch.autograd.grad(loss, columns["logprobs"])
    (expected,) = torch.autograd.grad(plain_loss("grpo", exact, mask, config, "token-mean", None), exact["logprobs"])
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROLLED_OUT)
def test_loss_gradients_and_statistics_do_not_depend_on_the_cut(name: str) -> None:
    """Nor on whether sequences are padded rows or lie end to end."""
    torch.manual_seed(8)
    mask = mask_with_holes(10, 7)
    config = settings_of(name)
    length = config.normalising_length(7)
    columns, weights = columns_of(mask), token_weights(mask, config.loss_aggregation, normalising_length=length)
    cuts = [torch.randperm(10).tensor_split(sizes) for sizes in ([4], [1, 3, 8], [2, 5])]
    check_pieces_add_up(lambda given, weighted: call(name, given, weighted, config), columns, weights, "logprobs", cuts)


def settings_with_all_terms(name: str) -> Any:
    """Also of algorithms that learn from pairs, whose settings refuse what they have no use for."""
    return settings_of(name) if name in ROLLED_OUT else load(name).settings()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_without_samples_adds_nothing(name: str) -> None:
    """A rank with fewer samples than another rank has micro-batches has one: zeros through which gradients flow."""
    torch.manual_seed(9)
    mask = mask_with_holes(4, 5)
    columns, config = columns_of(mask), settings_with_all_terms(name)
    columns["rollout_logprobs"] = columns["old_logprobs"] + 0.1
    weights = token_weights(mask, "token-mean")
    _, alone = call(name, columns, weights, config)
    empty = {key: column[:0].flatten() for key, column in columns.items()}
    empty["logprobs"].requires_grad_()
    loss, statistics = call(name, empty, weights[:0].flatten(), config)
    assert loss.item() == 0 and loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, empty["logprobs"])
    assert gradient.shape == (0,)
    for shards in ([statistics, alone], [alone, statistics], [statistics, alone, statistics]):
        assert Statistics.merge(shards).values() == alone.values()
    # All ranks add up their figures by name, in one order.
    assert [*statistics.sums, *statistics.means] == [*alone.sums, *alone.means]
    assert list(statistics.maxima) == list(alone.maxima)


@pytest.mark.parametrize("name", ROLLED_OUT)
def test_a_micro_batch_of_which_no_token_counts_adds_nothing(name: str) -> None:
    torch.manual_seed(10)
    columns, config = columns_of(mask_with_holes(3, 4)), settings_of(name)
    columns["logprobs"].requires_grad_()
    loss, statistics = call(name, columns, torch.zeros(3, 4), config)
    (gradient,) = torch.autograd.grad(loss, columns["logprobs"])
    assert loss.item() == 0 and not gradient.any()
    assert all(value == 0 for value in statistics.values().values())
