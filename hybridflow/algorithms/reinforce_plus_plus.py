"""REINFORCE++: no baseline of a prompt; advantages are whitened over the whole batch (arXiv:2501.03262).

Needs no other model. With a baseline of the group: `reinforce_plus_plus_baseline`.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from hybridflow.algorithms.advantages.gae import token_rewards
from hybridflow.algorithms.advantages.returns import discounted_returns
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.base import Estimated, Experience, Step
from hybridflow.algorithms.kl_control import reward_kl
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.without_critic import without_critic
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns


class ReinforcePlusPlusSettings(ClippedSettings):
    """Settings of REINFORCE++: one response to a prompt is enough."""

    name: str = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward for each token it is away."""


def with_advantages(step: Step[ReinforcePlusPlusSettings], experience: Experience) -> Experience:
    """Compute an advantage for each token, because the KL penalty of a token counts for those before it."""
    batch, advantages = step.estimate(experience.batch, estimate_advantages, role="actor")
    return replace(experience, batch=batch, whiten=advantages)


def estimate_advantages(batch: SampleBatch, *, config: ReinforcePlusPlusSettings) -> Columns:
    """Compute column `advantages` of samples with rewards, before they are whitened.

        A_t = sum_{l >= t} gamma^(l - t) ([l is the last] r - kl_coef * kl_l)

    Whitening takes mean and standard deviation over all loss tokens of the batch (`whiten`): as in OpenRLHF without
    Bessel's correction, which verl has; the epsilons differ (here 1e-6 in the standard deviation, there 1e-8 in the
    variance).
    """
    assert batch.rewards is not None
    mask, kl = batch.padded(batch.response_mask), reward_kl(batch, config)
    rewards = token_rewards(batch.rewards, mask, None if kl is None else batch.padded(kl), config.kl_coef)
    advantages = batch.flat(discounted_returns(rewards, mask, gamma=config.gamma))
    return Columns({"advantages": advantages}, note=Estimated(moments(advantages, batch.response_mask), {}))


ALGORITHM = without_critic(ReinforcePlusPlusSettings, with_advantages)
