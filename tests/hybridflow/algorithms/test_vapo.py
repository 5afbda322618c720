"""VAPO: two lambdas, what the critic learns first, and which samples count as right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.algorithms import ppo, vapo
from hybridflow.algorithms.advantages.gae import gae_advantages, length_adaptive_lambda, token_rewards
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.ppo import PPOSettings
from hybridflow.algorithms.vapo import VAPOSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import LOSS_TOKENS
from hybridflow.metrics import names as metrics
from tests.support.steps import NumberedStep


def a_batch() -> SampleBatch:
    torch.manual_seed(2)
    lengths = [30, 4, 60]
    batch = SampleBatch.from_generations(
        prompts=[[5], [6, 7], [8]],
        responses=[[9] * length for length in lengths],
        logprobs=[[-0.5] * length for length in lengths],
        sample_ids=[0, 1, 2],
        group_ids=[0, 0, 1],
        prompt_indices=[0, 0, 1],
        policy_versions=[1, 1, 1],
        finish_reasons=["stop"] * 3,
        response_masks=[[True] * 30, [True, False, True, True], [True] * 60],
    )
    tokens = len(batch.logprobs)
    return batch.replace(
        rewards=torch.tensor([1.0, 0.0, 0.5]), values=torch.randn(tokens), ref_logprobs=-torch.rand(tokens)
    )


def test_the_defaults_are_the_papers() -> None:
    config = VAPOSettings()
    assert (config.critic_gae_lambda, config.length_adaptive_alpha, config.positive_lm_coef) == (1.0, 0.05, 0.1)
    assert (config.clip_high, config.critic_warmup_steps, config.gamma) == (0.28, 50, 1.0)
    assert config.needs_critic and config.loss_aggregation == "token-mean"


def test_the_policys_advantages_and_the_critics_returns_have_lambdas_of_their_own() -> None:
    batch, config = a_batch(), VAPOSettings(kl_coef=0.1, gamma=0.99)
    result = vapo.estimate_advantages(batch, config=config, critic_lambda=0.9)
    mask = batch.padded(batch.response_mask)
    assert batch.values is not None and batch.ref_logprobs is not None and batch.rewards is not None
    kl = batch.padded(batch.logprobs - batch.ref_logprobs)
    rewards, values = token_rewards(batch.rewards, mask, kl, 0.1), batch.padded(batch.values)
    for row, length in enumerate((30, 3, 60)):  # loss tokens
        lam = max(1 - 1 / (0.05 * length), 0)
        one = slice(row, row + 1)
        advantages, _ = gae_advantages(rewards[one], values[one], mask[one], gamma=0.99, lam=lam)
        _, returns = gae_advantages(rewards[one], values[one], mask[one], gamma=0.99, lam=0.9)
        torch.testing.assert_close(batch.padded(result.tokens["advantages"])[one], advantages)
        torch.testing.assert_close(batch.padded(result.tokens["returns"])[one], returns)


def test_with_one_lambda_for_both_it_is_ppo() -> None:
    batch = a_batch()
    config = VAPOSettings(length_adaptive_alpha=None, gae_lambda=0.95)
    advantages = vapo.estimate_advantages(batch, config=config, critic_lambda=0.95)
    expected = ppo.estimate_advantages(batch, config=PPOSettings(gae_lambda=0.95))
    assert all(torch.equal(advantages.tokens[name], column) for name, column in expected.tokens.items())
    assert advantages.note == expected.note


class RecordingStep(NumberedStep):
    """Remembers the lambda of the critic's returns."""

    critic_lambda: float

    def estimate(self, batch: Any, function: Any, role: str, **arguments: float) -> Any:
        self.critic_lambda = arguments["critic_lambda"]
        return super().estimate(batch, function, role, **arguments)


@pytest.mark.parametrize(("number", "expected"), [(1, 1.0), (2, 1.0), (3, 0.9)])
def test_the_critic_begins_with_monte_carlo_returns(number: int, expected: float) -> None:
    config = VAPOSettings(critic_warmup_steps=2, critic_gae_lambda=0.9)
    step = RecordingStep(config, lambda group, sample: float(sample), number=number)
    vapo.make_experience(step)
    assert step.critic_lambda == expected


def test_right_responses_of_a_mini_batch_get_their_weights() -> None:
    step = NumberedStep(VAPOSettings(), lambda group, sample: float(sample > 1), lambda group, sample: 1 + sample)
    batch = step.rewards(step.generate(step.draw(1)))
    weights = sequence_weights(batch.per_sample[LOSS_TOKENS], "token-mean")
    result = vapo.prepare(step, batch.with_per_sample(weights=weights)).per_sample["lm_weights"]
    assert result.tolist() == pytest.approx([0.0, 0.0, 10 / 7, 10 / 7])  # 3 + 4 of 10 tokens
    off = NumberedStep(VAPOSettings(positive_lm_coef=0.0), lambda group, sample: 1.0)
    assert "lm_weights" not in vapo.prepare(off, batch.with_per_sample(weights=weights)).per_sample


def test_the_likelihood_of_right_responses_is_told_as_a_mean() -> None:
    for share, expected in ((0.25, 2.0), (0.0, None)):
        step = NumberedStep(VAPOSettings(), lambda group, sample: 1.0)
        step.values |= {metrics.TRAIN_POSITIVE_SHARE: share, metrics.TRAIN_POSITIVE_NLL: 0.5}
        vapo.learn(step, Experience(step.generate(step.draw())))
        assert step.values.get(metrics.TRAIN_POSITIVE_NLL) == expected


def test_lengths_are_those_of_counted_tokens() -> None:
    batch = a_batch()
    assert batch.sums(batch.response_mask).tolist() == [30, 3, 60]
    assert length_adaptive_lambda(batch.sums(batch.response_mask), 0.05).tolist() == pytest.approx([1 / 3, 0, 2 / 3])
