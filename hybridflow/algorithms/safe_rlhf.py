"""Safe-RLHF: the most reward at no more than a limit of cost (arXiv:2310.12773)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, model_validator

from hybridflow.algorithms import ppo
from hybridflow.algorithms.advantages.safe_rlhf import safe_advantages
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.base import Algorithm, Estimated, Experience, Step
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.algorithms.losses.value import value_moments
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics


class SafeRLHFSettings(ppo.PPOSettings):
    """Settings of Safe-RLHF: PPO's, and those of the costs."""

    needs_cost: ClassVar[bool] = True
    unscheduled: ClassVar[frozenset[str]] = ppo.PPOSettings.unscheduled | {
        *("lagrange_initial", "lagrange_lr", "lagrange_min", "lagrange_max")
    }

    name: str = "safe_rlhf"
    cost_limit: float = 0.0
    """The mean cost of a response that is allowed."""
    lagrange_initial: float = Field(default=1.0, gt=0)
    """The Lagrange multiplier, the weight of cost against reward, at the start."""
    lagrange_lr: float = Field(default=0.1, ge=0)
    """Learning rate of the multiplier's logarithm; 0 keeps the multiplier."""
    lagrange_min: float = Field(default=0.05, gt=0)
    """The multiplier falls no lower. From 0.05, with costs of 1 above the limit and a lagrange_lr of 0.1, it is back at
    1 after 190 steps."""
    lagrange_max: float = Field(default=5.0, gt=0)
    """The multiplier grows no larger."""

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> Self:
        if not self.lagrange_min <= self.lagrange_initial <= self.lagrange_max:
            raise ValueError(
                f"lagrange_initial is {self.lagrange_initial}, expected between lagrange_min, {self.lagrange_min}, and "
                f"lagrange_max, {self.lagrange_max}"
            )
        return self


def make_experience(step: Step[SafeRLHFSettings]) -> Experience:
    """Make PPO's experience on the Lagrangian of reward and cost."""
    batch = step.critic_values(step.logprobs(step.generate(step.draw())))
    return with_advantages(step, Experience(step.costs(step.rewards(batch))))


def with_advantages(step: Step[SafeRLHFSettings], experience: Experience) -> Experience:
    """Mix the estimates of both with the current multiplier, and add the returns of both critics."""
    step.values[metrics.COST_MULTIPLIER] = multiplier = step.multiplier.value
    batch, advantages = step.estimate(experience.batch, estimate_advantages, role="critic", multiplier=multiplier)
    return replace(experience, batch=batch, whiten=advantages if step.config.whiten_advantages else None)


def learn(step: Step[SafeRLHFSettings], experience: Experience) -> None:
    """Take a step of the multiplier, and PPO's updates. While the critics alone learn, the multiplier stays."""
    if step.number > step.config.critic_warmup_steps:
        # No multiplier could bring the costs of a policy that does not learn to their limit.
        step.multiplier.update(float(experience.batch.per_sample["costs"].double().mean()))
    ppo.learn(step, experience)


def estimate_advantages(batch: SampleBatch, *, config: SafeRLHFSettings, multiplier: float) -> Columns:
    """Compute columns `advantages`, `returns` and `cost_returns` of samples with rewards, costs, and values of both."""
    assert batch.rewards is not None and batch.costs is not None
    assert batch.values is not None and batch.cost_values is not None
    mask, kl = batch.response_mask, reward_kl(batch, config)
    reward_advantages, returns = ppo.estimated(batch, batch.rewards, batch.values, kl, config.kl_coef, config)
    cost_advantages, cost_returns = ppo.estimated(batch, batch.costs, batch.cost_values, kl, -config.kl_coef, config)
    advantages = safe_advantages(reward_advantages, cost_advantages, multiplier)
    note = Estimated(
        moments(advantages, mask),
        {
            "reward": value_moments(batch.values, returns, mask),
            "cost": value_moments(batch.cost_values, cost_returns, mask),
        },
    )
    return Columns({"advantages": advantages, "returns": returns, "cost_returns": cost_returns}, note=note)


ALGORITHM = Algorithm(SafeRLHFSettings, make_experience, with_advantages, learn)
