"""Safe-RLHF: the most reward at no more than a limit of cost (arXiv:2310.12773)."""

from __future__ import annotations

from hybridflow.algorithms.advantages.gae import gae_advantages, token_rewards
from hybridflow.algorithms.advantages.safe_rlhf import safe_advantages
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.algorithms.losses.value import value_moments
from hybridflow.batch.rollout_batch import RolloutBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics
from hybridflow.trainer.step import Estimated, Step


def safe_rlhf(step: Step) -> None:
    """One step: PPO on the Lagrangian of reward and cost, and a step of its multiplier."""
    batch = step.generate(step.draw())
    batch = step.critic_values(step.logprobs(batch))
    batch = step.costs(step.rewards(batch))
    multiplier = step.machinery.controllers.multiplier
    step.values[metrics.COST_MULTIPLIER] = multiplier.value
    batch, advantages = step.estimate(batch, estimate_advantages, role="critic", multiplier=multiplier.value)
    multiplier.update(float(batch.facts["costs"].double().mean()))
    step.update(batch, whiten=advantages if step.config.whiten_advantages else None)


def estimate_advantages(batch: RolloutBatch, *, config: AlgorithmConfig, multiplier: float) -> Columns:
    """Columns `advantages`, `returns` and `cost_returns` of samples with rewards, costs, and values of both."""
    assert batch.rewards is not None and batch.costs is not None
    assert batch.values is not None and batch.cost_values is not None
    mask, kl = batch.response_mask, reward_kl(batch, config)
    settings = {"gamma": config.gamma, "lam": config.gae_lambda}
    rewards = token_rewards(batch.rewards, mask, kl, config.kl_coef)
    costs = token_rewards(batch.costs, mask, kl, -config.kl_coef)
    reward_advantages, returns = gae_advantages(rewards, batch.values, mask, **settings)
    cost_advantages, cost_returns = gae_advantages(costs, batch.cost_values, mask, **settings)
    advantages = safe_advantages(reward_advantages, cost_advantages, multiplier)
    note = Estimated(
        moments(advantages, mask),
        {
            "reward": value_moments(batch.values, returns, mask),
            "cost": value_moments(batch.cost_values, cost_returns, mask),
        },
    )
    return Columns({"advantages": advantages, "returns": returns, "cost_returns": cost_returns}, note=note)
