"""VAPO: PPO whose critic is made good first, for long responses and rewards that are few (arXiv:2504.05118)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from hybridflow.algorithms import ppo
from hybridflow.algorithms.advantages.gae import gae_advantages, length_adaptive_lambda, token_rewards
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.base import Algorithm, Estimated, Experience, Step
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.losses.positive_lm import positive_weights, with_positive_lm
from hybridflow.algorithms.losses.value import value_moments
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import LOSS_TOKENS, Columns
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor


class VAPOSettings(ppo.PPOSettings):
    """Settings of VAPO: PPO's, with the paper's values. Group sampling is `rollout.samples_per_prompt`, 16 there."""

    name: str = "vapo"
    clip_high: float = Field(default=0.28, gt=0)
    critic_warmup_steps: int = Field(default=50, ge=0)
    """Value pre-training: the first steps, in which the policy stays as it is and the critic alone learns, from
    Monte-Carlo returns (critic_gae_lambda 1, whatever it is afterwards)."""
    critic_gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the returns that the critic learns. At 1 they are sums of rewards, and free of its own errors."""
    length_adaptive_alpha: float | None = Field(default=0.05, gt=0)
    """Lambda of the policy's advantages is 1 - 1 / (alpha * tokens of the response), and 0 where that is negative; if
    null, it is gae_lambda for all."""
    positive_lm_coef: float = Field(default=0.1, ge=0)
    """Weight of the negative log-likelihood of right responses; off at 0."""
    right_above: float = 0.0
    """A response is right where its reward is above this."""

    @property
    def _unused(self) -> dict[str, str]:
        unused = dict(super()._unused)
        if self.length_adaptive_alpha is not None:
            unused["gae_lambda"] = "length_adaptive_alpha, which takes its place; expected length_adaptive_alpha null"
        if self.positive_lm_coef == 0:
            unused["right_above"] = "positive_lm_coef 0, which does not use it; expected positive_lm_coef above 0"
        return unused


def make_experience(step: Step[VAPOSettings]) -> Experience:
    """Make PPO's experience with advantages and returns of two lambdas."""
    batch = step.critic_values(step.logprobs(step.generate(step.draw())))
    return with_advantages(step, Experience(step.rewards(batch)))


def with_advantages(step: Step[VAPOSettings], experience: Experience) -> Experience:
    """Add the estimates, and the returns that the critic is trained on."""
    config = step.config
    critic_lambda = 1.0 if step.number <= config.critic_warmup_steps else config.critic_gae_lambda
    batch, advantages = step.estimate(experience.batch, estimate_advantages, role="critic", critic_lambda=critic_lambda)
    return replace(experience, batch=batch, whiten=advantages if config.whiten_advantages else None)


def learn(step: Step[VAPOSettings], experience: Experience) -> None:
    """Update the critic, and the actor once the critic has been pre-trained."""
    ppo.learn(step, experience)
    share = step.values.get(metrics.TRAIN_POSITIVE_SHARE)
    if share is not None:
        total = step.values.pop(metrics.TRAIN_POSITIVE_NLL)
        if share:
            step.values[metrics.TRAIN_POSITIVE_NLL] = total / share


def prepare(step: Step[VAPOSettings], batch: RemoteBatch) -> RemoteBatch:
    """Add the column `lm_weights`, which depends on the right responses of the whole mini-batch."""
    per_sample, config = batch.per_sample, step.config
    if config.positive_lm_coef == 0:
        return batch
    factors = positive_weights(
        per_sample["rewards"], per_sample[LOSS_TOKENS], per_sample["weights"], right_above=config.right_above
    )
    return batch.with_per_sample(lm_weights=factors)


def policy_loss(columns: TokenColumns, config: VAPOSettings) -> PolicyLoss:
    """Return the clipped surrogate and, weighted, the negative log-likelihood of right responses."""
    policy = clipped_loss(columns, config)
    return with_positive_lm(policy, columns, config.positive_lm_coef) if config.positive_lm_coef > 0 else policy


def estimate_advantages(batch: SampleBatch, *, config: VAPOSettings, critic_lambda: float) -> Columns:
    """Compute columns `advantages` and `returns` of samples with rewards and values."""
    assert batch.rewards is not None and batch.values is not None
    lam: float | Tensor = config.gae_lambda
    if config.length_adaptive_alpha is not None:
        lam = length_adaptive_lambda(batch.sums(batch.response_mask), config.length_adaptive_alpha)
    mask, kl = batch.response_mask, reward_kl(batch, config)
    padded, values = batch.padded(mask), batch.padded(batch.values)
    rewards = token_rewards(batch.rewards, padded, None if kl is None else batch.padded(kl), config.kl_coef)
    of_policy, _ = gae_advantages(rewards, values, padded, gamma=config.gamma, lam=lam)
    _, of_critic = gae_advantages(rewards, values, padded, gamma=config.gamma, lam=critic_lambda)
    advantages, returns = batch.flat(of_policy), batch.flat(of_critic)
    note = Estimated(moments(advantages, mask), {"reward": value_moments(batch.values, returns, mask)})
    return Columns({"advantages": advantages, "returns": returns}, note=note)


ALGORITHM = Algorithm(VAPOSettings, make_experience, with_advantages, learn, policy_loss, prepare)
