"""On-policy distillation: its loss by hand, against autograd of the plain formula, however a mini-batch is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.distillation import DistillationSettings, distillation_loss
from hybridflow.algorithms.losses.policy import TokenColumns, policy_gradient_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.metrics import names as metrics
from tests.support.columns import check_pieces_add_up, mask_with_holes, soiled, token_weights

IN_REWARD = DistillationSettings()
IN_LOSS = DistillationSettings(divergence_in="loss", top_k=3)
BOTH = DistillationSettings(divergence_in="loss", top_k=3, reward_coef=0.5, clip_high=0.28, divergence="jsd")
SETTINGS = pytest.mark.parametrize("config", [IN_REWARD, IN_LOSS, BOTH], ids=["reward", "loss", "both"])


def random_columns(samples: int, width: int, *, advantages: float = 1.0) -> dict[str, Tensor]:
    logprobs = -torch.rand(samples, width) * 3
    student, teacher = torch.randn(2, samples, width, 5).log_softmax(dim=-1)[..., :3]
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.3 * torch.randn(samples, width),
        "advantages": advantages * torch.randn(samples, 1).expand(samples, width),
        "teacher_logprobs": logprobs + torch.randn(samples, width),
        "teacher_agrees": (torch.rand(samples, width) < 0.5).float(),
        "chosen_logprobs": student,
        "teacher_chosen_logprobs": teacher,
    }


def call(columns: dict[str, Tensor], weights: Tensor, config: DistillationSettings) -> tuple[Tensor, Statistics]:
    given = dict(columns)
    if config.divergence_in == "reward":  # there are no such columns
        del given["chosen_logprobs"], given["teacher_chosen_logprobs"]
    logprobs = given.pop("logprobs")
    return policy_gradient_loss(logprobs, weights=weights, config=config, policy_loss=distillation_loss, **given)


def stats(config: DistillationSettings, **columns: Any) -> Any:
    """The loss of single tokens."""
    given = {name: torch.tensor(column) for name, column in columns.items()}
    local = {name: given.pop(name) for name in ("logprobs", "old_logprobs", "advantages")}
    return distillation_loss(
        TokenColumns(**local, loss_mask=torch.ones_like(local["logprobs"]).bool(), others=given), config
    )


def test_the_reward_of_a_token_by_hand() -> None:
    """A token that the teacher finds twice as likely, one that it finds half as likely, and one that it finds alike."""
    old = [math.log(0.2), math.log(0.4), math.log(0.3)]
    result = stats(
        IN_REWARD,
        logprobs=[math.log(0.22), math.log(0.36), math.log(0.3)],
        old_logprobs=old,
        advantages=[0.0, 1.0, 2.0],
        teacher_logprobs=[math.log(0.4), math.log(0.2), math.log(0.3)],
        teacher_agrees=[1.0, 0.0, 1.0],
    )
    two = math.log(2)
    torch.testing.assert_close(result.ratio, torch.tensor([1.1, 0.9, 1.0]))
    torch.testing.assert_close(result.loss, torch.tensor([-1.1 * two, -0.9 * (1 - two), -2.0]))
    torch.testing.assert_close(result.stats[metrics.DISTILLATION_KL_K1], torch.tensor([-two, two, 0.0]))
    torch.testing.assert_close(result.stats[metrics.DISTILLATION_KL_K3], torch.tensor([1 - two, two - 0.5, 0.0]))
    assert result.stats[metrics.DISTILLATION_AGREEMENT].tolist() == [1, 0, 1]
    assert metrics.DISTILLATION_DIVERGENCE not in result.stats


def test_the_divergence_of_a_token_by_hand() -> None:
    """Beside an advantage of half a reward; at its own probabilities the teacher asks for nothing."""
    given = {
        "logprobs": [0.0] * 2,
        "old_logprobs": [0.0] * 2,
        "teacher_logprobs": [-1.0] * 2,
        "teacher_agrees": [0.0] * 2,
    }
    q, p = [math.log(0.5), math.log(0.25)], [math.log(0.25), math.log(0.5)]
    result = stats(IN_LOSS, **given, advantages=[0.0, 0.0], chosen_logprobs=[q, p], teacher_chosen_logprobs=[p, p])
    quarter = 0.25 * math.log(2)
    torch.testing.assert_close(result.loss, torch.tensor([quarter, 0.0]))
    torch.testing.assert_close(result.stats[metrics.DISTILLATION_DIVERGENCE], torch.tensor([quarter, 0.0]))
    config = IN_LOSS.model_copy(update={"reward_coef": 0.5})
    result = stats(config, **given, advantages=[0.5, -0.5], chosen_logprobs=[q, p], teacher_chosen_logprobs=[p, p])
    torch.testing.assert_close(result.loss, torch.tensor([quarter - 0.5, 0.5]))


def test_the_gradient_in_the_reward_is_that_of_the_reverse_kl_in_expectation() -> None:
    """Over all tokens that can be drawn, each with its probability: the gradient of the exact KL, by autograd."""
    student, teacher = torch.randn(2, 6, dtype=torch.float64)
    logits = student.clone().requires_grad_()
    logprobs, of_teacher = logits.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - of_teacher)).sum(), logits)
    logprobs = logits.log_softmax(dim=-1)
    loss, _ = policy_gradient_loss(
        logprobs,
        advantages=torch.zeros(6),
        weights=logprobs.detach().exp().float(),
        config=IN_REWARD,
        policy_loss=distillation_loss,
        teacher_logprobs=of_teacher,
        teacher_agrees=torch.zeros(6),
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


@SETTINGS
def test_the_gradient_against_autograd_of_the_plain_formula(config: DistillationSettings) -> None:
    torch.manual_seed(5)
    columns, mask = random_columns(5, 6), mask_with_holes(5, 6)
    weights = token_weights(mask, "seq-mean-token-mean")
    learned = "logprobs" if config.divergence_in == "reward" else "chosen_logprobs"
    names = ["logprobs"] if config is IN_REWARD else ["chosen_logprobs"] if config is IN_LOSS else ["logprobs", learned]
    for name in names:
        columns[name].requires_grad_()
    loss, _ = call(columns, weights, config)
    gradient = torch.autograd.grad(loss, [columns[name] for name in names])

    exact = {name: column.detach().double().requires_grad_(name in names) for name, column in columns.items()}
    advantages = exact["advantages"].clone()
    if config.divergence_in == "reward":
        advantages = advantages + exact["teacher_logprobs"] - exact["old_logprobs"]
    ratio = (exact["logprobs"] - exact["old_logprobs"]).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    entry = -torch.minimum(ratio * advantages, clipped * advantages)
    if config.divergence_in == "loss":
        q, p = (
            torch.cat([column.exp(), 1 - column.exp().sum(dim=-1, keepdim=True)], dim=-1)
            for column in (exact["chosen_logprobs"], exact["teacher_chosen_logprobs"])
        )
        middle = q if config.divergence == "reverse_kl" else (q + p) / 2
        if config.divergence == "reverse_kl":
            entry = entry + (q * (q / p).log()).sum(dim=-1)
        else:
            entry = entry + 0.5 * (p * (p / middle).log() + q * (q / middle).log()).sum(dim=-1)
    expected_loss = (entry * weights.double()).sum()
    expected = torch.autograd.grad(expected_loss, [exact[name] for name in names])
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-4)


@SETTINGS
def test_loss_gradients_and_statistics_do_not_depend_on_the_cut(config: DistillationSettings) -> None:
    torch.manual_seed(3)
    columns, mask = random_columns(12, 8), mask_with_holes(12, 8)
    weights = token_weights(mask, "token-mean")
    cuts = [torch.randperm(12).tensor_split(sizes) for sizes in ([3, 7], [1, 2, 9], [6])]
    learned = "logprobs" if config.divergence_in == "reward" else "chosen_logprobs"
    result = check_pieces_add_up(lambda given, weighted: call(given, weighted, config), columns, weights, learned, cuts)
    assert 0 < result[metrics.DISTILLATION_AGREEMENT] < 1
    assert (metrics.DISTILLATION_DIVERGENCE in result) == (config.divergence_in == "loss")


@SETTINGS
def test_what_does_not_count_is_not_read(config: DistillationSettings) -> None:
    torch.manual_seed(4)
    columns, mask = random_columns(6, 8), mask_with_holes(6, 8)
    weights = token_weights(mask, "token-mean")
    expected, statistics = call(columns, weights, config)
    dirty = {
        name: soiled(column, mask[..., None].expand_as(column) if column.dim() == 3 else mask)
        for name, column in columns.items()
    }
    learned = [dirty[name].requires_grad_() for name in ("logprobs", "chosen_logprobs")]
    result, others = call(dirty, weights, config)
    torch.testing.assert_close(result, expected, atol=0, rtol=0)
    assert others.values() == statistics.values()
    for gradient in torch.autograd.grad(result, learned, allow_unused=True):
        assert gradient is None or (gradient.isfinite().all() and not gradient[~mask].any())


def test_a_column_that_is_too_wide_or_not_there_is_refused() -> None:
    torch.manual_seed(6)
    columns, mask = random_columns(3, 4), mask_with_holes(3, 4)
    weights = token_weights(mask, "token-mean")
    with pytest.raises(ValueError, match=r"teacher_logprobs has shape \(3, 4, 3\), weights \(3, 4\)"):
        call(columns | {"teacher_logprobs": columns["chosen_logprobs"]}, weights, IN_LOSS)
    only = {name: column for name, column in columns.items() if name not in ("logprobs", "chosen_logprobs")}
    with pytest.raises(ValueError, match="no column chosen_logprobs, which the loss needs"):
        policy_gradient_loss(
            columns["logprobs"], weights=weights, config=IN_LOSS, policy_loss=distillation_loss, **only
        )
