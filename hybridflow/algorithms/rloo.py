"""RLOO: each response against the mean of the others to its prompt (arXiv:2402.14740). Needs no other model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hybridflow.algorithms.advantages.group_relative import leave_one_out_advantages
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.without_critic import without_critic


class RLOOSettings(DynamicSamplingSettings, ClippedSettings):
    """Settings of RLOO.

    In the paper a response is one action, whose log-prob is the sum over its tokens, the KL divergence is in its
    reward, and each rollout makes one update, without clipping. So is the gradient here with one update a step, where
    the ratio is 1. With several, the ratio of each token is clipped as in PPO; TRL clips that of the whole response.
    """

    group_baseline: ClassVar[bool] = True

    name: str = "rloo"
    loss_aggregation: AggregationMode = "seq-mean-token-sum"


def with_advantages(step: Step[RLOOSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response."""
    batch = experience.batch
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    advantages = leave_one_out_advantages(rewards, batch.per_sample["group_ids"])
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


ALGORITHM = without_critic(RLOOSettings, with_advantages)
