"""OPO: exactly on-policy, with the baseline of least variance (arXiv:2505.23585). Needs no other model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hybridflow.algorithms.advantages.group_relative import length_weighted_advantages
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.losses.reinforce import reinforce_loss
from hybridflow.algorithms.without_critic import without_critic
from hybridflow.batch.worker_output import LOSS_TOKENS


class OPOSettings(DynamicSamplingSettings):
    """Settings of OPO: no clip, because each rollout makes one update. The paper has neither KL nor entropy terms."""

    group_baseline: ClassVar[bool] = True
    on_policy: ClassVar[bool] = True

    name: str = "opo"


def with_advantages(step: Step[OPOSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response."""
    batch = experience.batch
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    advantages = length_weighted_advantages(rewards, batch.per_sample[LOSS_TOKENS], batch.per_sample["group_ids"])
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


ALGORITHM = without_critic(OPOSettings, with_advantages, reinforce_loss)
