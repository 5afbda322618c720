"""PPO with a critic (arXiv:1707.06347), as InstructGPT uses it on language models (arXiv:2203.02155)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hybridflow.algorithms.advantages.gae import gae_advantages, token_rewards
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.base import Algorithm, Estimated, Experience, Step
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.algorithms.losses.value import value_moments
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns

if TYPE_CHECKING:
    from torch import Tensor


class PPOSettings(ClippedSettings):
    """Settings of PPO."""

    needs_critic: ClassVar[bool] = True

    name: str = "ppo"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward for each token it is away."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Generalized advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Range of a value's change in one step before its loss is clipped; off when null."""
    whiten_advantages: bool = True
    """Bring the advantages of a batch (with safe_rlhf, the mixed ones) to mean 0 and standard deviation 1."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which only the critics learn."""


def make_experience(step: Step[PPOSettings]) -> Experience:
    """Make the experience with generalized advantage estimates over the critic's values."""
    batch = step.critic_values(step.logprobs(step.generate(step.draw())))
    return with_advantages(step, Experience(step.rewards(batch)))


def with_advantages(step: Step[PPOSettings], experience: Experience) -> Experience:
    """Add the estimates, and the returns that the critic is trained on."""
    batch, advantages = step.estimate(experience.batch, estimate_advantages, role="critic")
    return replace(experience, batch=batch, whiten=advantages if step.config.whiten_advantages else None)


def learn(step: Step[PPOSettings], experience: Experience) -> None:
    """Update the critic, and the actor once the critic has had its first steps."""
    config = step.config
    step.update(experience, value_clip=config.value_clip, critics_only=step.number <= config.critic_warmup_steps)


def estimate_advantages(batch: SampleBatch, *, config: PPOSettings) -> Columns:
    """Compute columns `advantages` and `returns` of samples with rewards and values."""
    assert batch.rewards is not None and batch.values is not None
    kl = reward_kl(batch, config)
    advantages, returns = estimated(batch, batch.rewards, batch.values, kl, config.kl_coef, config)
    mask = batch.response_mask
    note = Estimated(moments(advantages, mask), {"reward": value_moments(batch.values, returns, mask)})
    return Columns({"advantages": advantages, "returns": returns}, note=note)


def estimated(
    batch: SampleBatch, scores: Tensor, values: Tensor, kl: Tensor | None, kl_coef: float, config: PPOSettings
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns, (R,) float32 each, by generalized advantage estimation on padded rows.

    Args:
        batch: the samples.
        scores: (B,) reward or cost of each.
        values: (R,) of a critic of these.
        kl: (R,) divergence from the reference, if it is part of them.
        kl_coef: its weight, below 0 where the scores are to be small.
        config: the settings.
    """
    mask = batch.padded(batch.response_mask)
    rewards = token_rewards(scores, mask, None if kl is None else batch.padded(kl), kl_coef)
    advantages, returns = gae_advantages(rewards, batch.padded(values), mask, gamma=config.gamma, lam=config.gae_lambda)
    return batch.flat(advantages), batch.flat(returns)


ALGORITHM = Algorithm(PPOSettings, make_experience, with_advantages, learn)
