"""GRPO: each response against the others to its prompt (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings, rewarded_samples
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.turn_credit import has_turns, with_turn_advantages


class GroupSettings(DynamicSamplingSettings):
    """Settings of an algorithm with GRPO's advantages."""

    group_baseline: ClassVar[bool] = True

    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"
    normalise_advantages_by_std: bool = True
    """Divide by the standard deviation of the group's rewards; false is Dr. GRPO."""


class GRPOSettings(GroupSettings, ClippedSettings):
    """Settings of GRPO."""

    name: str = "grpo"


def make_experience(step: Step[GroupSettings]) -> Experience:
    """Make the experience without a critic: the baseline of a response is the mean reward of its group."""
    return with_advantages(step, Experience(rewarded_samples(step)))


def with_advantages(step: Step[GroupSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response, or of its turn where these have returns."""
    batch = experience.batch
    if has_turns(batch):
        batch = with_turn_advantages(step, batch, normalise_by_std=step.config.normalise_advantages_by_std)
        return replace(experience, batch=batch)
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    advantages = group_relative_advantages(
        rewards, batch.per_sample["group_ids"], normalise_by_std=step.config.normalise_advantages_by_std
    )
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


def learn(step: Step[GroupSettings], experience: Experience) -> None:
    """Update the actor."""
    step.update(experience)


ALGORITHM = Algorithm(GRPOSettings, make_experience, with_advantages, learn)
