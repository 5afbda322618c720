"""REINFORCE++ with baseline: a group's mean is taken away, then all is whitened (arXiv:2501.03262).

Needs no other model but, with a kl_coef, a reference. Unlike GRPO it divides by one standard deviation, of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.algorithms.advantages.whitening import sample_moments
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.without_critic import without_critic
from hybridflow.batch.worker_output import LOSS_TOKENS


class ReinforcePlusPlusBaselineSettings(DynamicSamplingSettings, ClippedSettings):
    """Settings of REINFORCE++ with baseline. Its KL divergence is in the loss with k2, whose gradient is unbiased."""

    group_baseline: ClassVar[bool] = True

    name: str = "reinforce_plus_plus_baseline"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k2"


def with_advantages(step: Step[ReinforcePlusPlusBaselineSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response, whitened over all tokens of the batch.

    A group of equal rewards, and so one of one sample, is 0 before that; whitening takes the batch's mean from it as
    from all others, which is 0 where responses have one length. verl takes no baseline from a group of one.
    """
    batch = experience.batch
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    advantages = group_relative_advantages(rewards, batch.per_sample["group_ids"], normalise_by_std=False)
    batch = batch.with_per_sample(advantages=advantages)
    return replace(experience, batch=batch, whiten=sample_moments(advantages, batch.per_sample[LOSS_TOKENS]))


ALGORITHM = without_critic(ReinforcePlusPlusBaselineSettings, with_advantages)
