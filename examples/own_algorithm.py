"""An algorithm in a file of one's own: the baseline of a response is the mean reward of the step.

hybridflow train launch/recipes/demo.yaml 'algorithm={name: examples/own_algorithm.py:ALGORITHM, shift: 0.1}'
"""

from dataclasses import replace

from pydantic import Field

from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.without_critic import without_critic


class MeanBaselineSettings(ClippedSettings):
    """Settings: those of PPO's clipped loss, and one more."""

    shift: float = Field(default=0.0, ge=0)
    """Reward that the baseline is above the mean."""


def with_advantages(step: Step[MeanBaselineSettings], experience: Experience) -> Experience:
    """The advantage of a response is that of each of its tokens."""
    batch = experience.batch
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    return replace(experience, batch=batch.with_per_sample(advantages=rewards - rewards.mean() - step.config.shift))


ALGORITHM = without_critic(MeanBaselineSettings, with_advantages)
