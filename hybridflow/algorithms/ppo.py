"""PPO with a critic (arXiv:1707.06347), as InstructGPT uses it on language models (arXiv:2203.02155)."""

from __future__ import annotations

from hybridflow.algorithms.advantages.gae import gae_advantages, token_rewards
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.algorithms.losses.value import value_moments
from hybridflow.batch.rollout_batch import RolloutBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.trainer.step import Estimated, Step


def ppo(step: Step) -> None:
    """One step: advantages are generalized advantage estimates over the critic's values."""
    batch = step.generate(step.draw())
    batch = step.critic_values(step.logprobs(batch))
    batch = step.rewards(batch)
    batch, advantages = step.estimate(batch, estimate_advantages, role="critic")
    step.update(batch, whiten=advantages if step.config.whiten_advantages else None)


def estimate_advantages(batch: RolloutBatch, *, config: AlgorithmConfig) -> Columns:
    """Columns `advantages` and `returns` of samples with rewards and values."""
    assert batch.rewards is not None and batch.values is not None
    mask = batch.response_mask
    rewards = token_rewards(batch.rewards, mask, reward_kl(batch, config), config.kl_coef)
    advantages, returns = gae_advantages(rewards, batch.values, mask, gamma=config.gamma, lam=config.gae_lambda)
    note = Estimated(moments(advantages, mask), {"reward": value_moments(batch.values, returns, mask)})
    return Columns({"advantages": advantages, "returns": returns}, note=note)
