"""KTO: Kahneman-Tversky optimization (arXiv:2402.01306), from responses that are desirable or not, without pairs.

No engine and no reference role is needed: the reference's log-probs are the actor's own, before its first update.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.losses.preference import (
    Judged,
    Responses,
    coefficient_loss,
    divergence,
    shares_above,
    unpaired_losses,
)
from hybridflow.algorithms.preferences import PAIR, PreferenceSettings, learn, prepare, with_advantages, with_reference
from hybridflow.metrics import names as metrics


class KTOSettings(PreferenceSettings):
    """Settings of KTO."""

    name: str = "kto"
    desirable_weight: float = Field(default=1.0, gt=0)
    """The paper's lambda_D. It advises weights by which both kinds count alike, up to 4/3 to 1."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """The paper's lambda_U."""

    @property
    def needs_engines(self) -> bool:
        """Whether responses are generated."""
        return False


def kto_loss(responses: Responses, config: KTOSettings) -> Judged:
    """`unpaired_losses` of the first response of each example; the second, to another prompt, is for z0 alone."""
    log_ratios = responses.policy - responses.reference
    own, desirable = log_ratios[:, 0], responses.rewards[:, 0] > 0
    z0 = divergence(log_ratios[:, 1])
    losses = unpaired_losses(
        own, desirable, z0, beta=config.beta, weights=(config.desirable_weight, config.undesirable_weight)
    )
    above = shares_above(own, z0)
    return Judged(
        losses,
        {
            metrics.PREFERENCE_ACCURACY: torch.where(desirable, above, 1 - above),
            metrics.PREFERENCE_CHOSEN_REWARD: config.beta * own[desirable],
            metrics.PREFERENCE_REJECTED_REWARD: config.beta * own[~desirable],
            metrics.PREFERENCE_CHOSEN_LOGPROB: responses.policy[desirable, 0],
            metrics.PREFERENCE_REJECTED_LOGPROB: responses.policy[~desirable, 0],
            metrics.PREFERENCE_Z0: z0[None],
        },
    )


def make_experience(step: Step[KTOSettings]) -> Experience:
    """The next examples of the data."""
    return Experience(step.given(step.draw()))


ALGORITHM = Algorithm(
    KTOSettings,
    make_experience,
    with_advantages,
    learn,
    policy_loss=coefficient_loss,
    prepare=partial(prepare, loss=kto_loss, learned=1),
    together=PAIR,
    preference_loss=kto_loss,
    read=with_reference,
)
