"""DAPO's settings, its care for long responses, and its loss against the paper's formula."""

from __future__ import annotations

import pytest
import torch

from engine3d.errors import EngineError
from hybridflow.algorithms import dapo
from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.algorithms.dapo import DAPOSettings
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.losses.policy import policy_gradient_loss
from hybridflow.metrics import names as metrics
from tests.support.steps import NumberedStep, ids

LONG = 8
"""The limit of a response."""


def truncated(group: int, sample: int) -> int:
    """Sample 0 of each group is cut off, as is all of group 1."""
    return LONG if sample == 0 or group == 1 else 3


def test_the_defaults_are_the_papers() -> None:
    config = DAPOSettings()
    assert (config.clip_low, config.clip_high, config.loss_aggregation) == (0.2, 0.28, "token-mean")
    assert config.kl_coef == 0 and not config.needs_reference and config.dynamic_sampling
    assert dapo.ALGORITHM.settings is DAPOSettings


def test_truncated_responses_leave_the_loss_and_count_in_the_baseline() -> None:
    step = NumberedStep(
        DAPOSettings(overlong_filter=True), lambda group, sample: float(sample == 1), truncated, limit=LONG
    )
    experience = dapo.make_experience(step)
    groups = experience.batch.per_sample["group_ids"].unique().tolist()
    assert groups == [0, 2, 3, 4]  # 1 has different rewards, and nothing to learn from
    assert step.values[metrics.SAMPLING_FILTERED] == 1
    dapo.learn(step, experience)
    [learned] = step.updated
    assert ids(learned.batch) == [100 * group + sample for group in groups for sample in (1, 2, 3)]
    of_four = group_relative_advantages(
        torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), normalise_by_std=True
    )
    assert torch.equal(learned.batch.per_sample["advantages"], of_four[1:].repeat(4))
    assert step.values[metrics.SAMPLING_OVERLONG] == 0.25


def test_a_step_of_truncated_responses_alone_stops_with_one_line() -> None:
    config = DAPOSettings(overlong_filter=True, dynamic_sampling=False)
    step = NumberedStep(config, lambda group, sample: float(sample), lambda group, sample: LONG, limit=LONG)
    experience = dapo.make_experience(step)
    with pytest.raises(EngineError, match="step 1: 16 of 16 responses are truncated and out of the loss by") as caught:
        dapo.learn(step, experience)
    assert len(str(caught.value).splitlines()) == 1
    assert not step.updated


def test_without_the_filter_truncated_responses_are_learned_from() -> None:
    step = NumberedStep(DAPOSettings(), lambda group, sample: float(sample), truncated, limit=LONG)
    experience = dapo.make_experience(step)
    dapo.learn(step, experience)
    assert len(step.updated[0].batch) == 16 and metrics.SAMPLING_OVERLONG not in step.values


def test_the_penalty_of_length_is_in_the_advantages_and_not_in_what_is_filtered() -> None:
    config = DAPOSettings(overlong_buffer=2, overlong_penalty=0.5)
    # Rewards of group 0 are equal and its lengths are not: nothing that the task says. In the others the only right
    # response is as long as may be.
    step = NumberedStep(
        config,
        lambda group, sample: float(sample == 0 and group > 0),
        lambda group, sample: (8, 7, 6, 1)[sample],
        limit=LONG,
    )
    experience = dapo.make_experience(step)
    assert experience.batch.per_sample["group_ids"].unique().tolist() == [1, 2, 3, 4]
    assert experience.batch.per_sample["rewards"].tolist() == [1.0, 0.0, 0.0, 0.0] * 4
    shaped = torch.tensor([1.0 - 0.5, 0.0 - 0.25, 0.0, 0.0])
    expected = group_relative_advantages(shaped, torch.zeros(4, dtype=torch.int64), normalise_by_std=True)
    assert torch.equal(experience.batch.per_sample["advantages"], expected.repeat(4))
    assert step.values[metrics.REWARD_OVERLONG] == pytest.approx(-0.75 / 4)


def test_the_loss_is_that_of_the_paper() -> None:
    """The objective with autograd in float64, and the gradient of what the trainer computes."""
    torch.manual_seed(3)
    lengths, rewards = [5, 2, 7, 3], torch.tensor([1.0, 0.0, 0.0, 1.0])
    tokens = sum(lengths)
    old = -torch.rand(tokens)
    logprobs = (old + 0.4 * torch.randn(tokens)).requires_grad_()
    groups = torch.zeros(4, dtype=torch.int64)
    of_tokens = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    advantages = group_relative_advantages(rewards, groups, normalise_by_std=True)[of_tokens]
    weights = sequence_weights(torch.tensor(lengths), "token-mean")[of_tokens]
    loss, stats = policy_gradient_loss(
        logprobs,
        advantages=advantages,
        weights=weights,
        old_logprobs=old,
        config=DAPOSettings(),
        policy_loss=dapo.ALGORITHM.policy_loss,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)

    exact = logprobs.detach().double().requires_grad_()
    normalised = (rewards.double() - rewards.double().mean()) / rewards.double().std()
    objective = torch.zeros((), dtype=torch.float64)
    for response, length in enumerate(lengths):
        for t in range(sum(lengths[:response]), sum(lengths[:response]) + length):
            ratio = (exact[t] - old[t].double()).exp()
            objective = objective + torch.minimum(
                ratio * normalised[response], ratio.clamp(1 - 0.2, 1 + 0.28) * normalised[response]
            )
    (-objective / tokens).backward()
    assert exact.grad is not None
    assert loss.item() == pytest.approx(-objective.item() / tokens, rel=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-7)
    assert 0 < stats.values()[metrics.TRAIN_CLIP_FRACTION_HIGH] < 1
