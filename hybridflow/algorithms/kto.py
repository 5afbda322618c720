"""KTO: Kahneman-Tversky optimization (arXiv:2402.01306), from responses that are desirable or not, without pairs.

No engine and no reference role is needed: the reference's log-probs are the actor's own, before its first update.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pydantic import Field

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.losses.preference import (
    PreferenceResult,
    ResponsePairs,
    coefficient_loss,
    divergence,
    shares_above,
    unpaired_losses,
)
from hybridflow.algorithms.preferences import PAIR, PreferenceSettings, learn, prepare, with_advantages, with_reference
from hybridflow.metrics import names as metrics


class KTOSettings(PreferenceSettings):
    """Settings of KTO."""

    unpaired: ClassVar[bool] = True
    name: str = "kto"
    desirable_weight: float = Field(default=1.0, gt=0)
    """The paper's lambda_D. It advises weights by which both kinds count alike, up to 4/3 to 1."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """The paper's lambda_U."""

    @property
    def needs_engines(self) -> bool:
        """True if responses are generated."""
        return False


def kto_loss(responses: ResponsePairs, config: KTOSettings) -> PreferenceResult:
    """Compute `unpaired_losses` of each example's first response. The second, to another prompt, is for z0 alone."""
    log_ratios = responses.policy - responses.reference
    log_ratio, desirable = log_ratios[:, 0], responses.rewards[:, 0] > 0
    z0 = divergence(log_ratios[:, 1])
    losses = unpaired_losses(
        log_ratio, desirable, z0, beta=config.beta, weights=(config.desirable_weight, config.undesirable_weight)
    )
    above = shares_above(log_ratio, z0)
    return PreferenceResult(
        losses,
        {
            metrics.PREFERENCE_ACCURACY: torch.where(desirable, above, 1 - above),
            metrics.PREFERENCE_CHOSEN_REWARD: config.beta * log_ratio[desirable],
            metrics.PREFERENCE_REJECTED_REWARD: config.beta * log_ratio[~desirable],
            metrics.PREFERENCE_CHOSEN_LOGPROB: responses.policy[desirable, 0],
            metrics.PREFERENCE_REJECTED_LOGPROB: responses.policy[~desirable, 0],
            metrics.PREFERENCE_Z0: z0[None],
        },
    )


def make_experience(step: Step[KTOSettings]) -> Experience:
    """Take the next examples of the data."""
    return Experience(step.given(step.draw()))


ALGORITHM = Algorithm(
    KTOSettings,
    make_experience,
    with_advantages,
    learn,
    policy_loss=coefficient_loss,
    prepare=partial(prepare, loss=kto_loss, trained_on=1),
    together=PAIR,
    preference_loss=kto_loss,
    read=with_reference,
)
