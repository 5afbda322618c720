"""Shared parts of algorithms that need only samples and their rewards: no critic, and no further responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.dynamic_sampling import rewarded_samples
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import PolicyLossFunction
from hybridflow.algorithms.settings import AlgorithmSettings


def without_critic[C: AlgorithmSettings](
    settings: type[C],
    with_advantages: Callable[[Step[C], Experience], Experience],
    policy_loss: PolicyLossFunction = clipped_loss,
) -> Algorithm[C]:
    """Make an algorithm of advantages and a loss, with dynamic sampling where its settings have it.

    Args:
        settings: its settings.
        with_advantages: an experience with the advantages that follow from its rewards.
        policy_loss: the loss of each token.
    """

    def make_experience(step: Step[C]) -> Experience:
        return with_advantages(step, Experience(rewarded_samples(step)))

    return Algorithm(settings, make_experience, with_advantages, learn, policy_loss)


def learn(step: Step[Any], experience: Experience) -> None:
    """Update the actor."""
    step.update(experience)
