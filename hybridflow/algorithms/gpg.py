"""GPG: the plain policy gradient with a group's mean as baseline (arXiv:2504.02546). Needs no other model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from hybridflow.algorithms.advantages.group_relative import valid_group_advantages
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.losses.reinforce import reinforce_loss
from hybridflow.algorithms.without_critic import without_critic
from hybridflow.metrics import names as metrics


class GPGSettings(DynamicSamplingSettings):
    """Settings of GPG: no clip, because the loss has no ratio. The paper has no KL divergence either."""

    group_baseline: ClassVar[bool] = True
    on_policy: ClassVar[bool] = True

    name: str = "gpg"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"

    @model_validator(mode="after")
    def _rewards_alone(self) -> Self:
        if self.kl_in == "reward":
            raise ValueError(
                "kl_in is 'reward' with name 'gpg', which asks whether rewards of a group differ; expected 'loss'"
            )
        return self


def with_advantages(step: Step[GPGSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response."""
    batch = experience.batch
    advantages, share = valid_group_advantages(batch.per_sample["rewards"], batch.per_sample["group_ids"])
    step.values[metrics.REWARD_VALID_FRACTION] = share
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


ALGORITHM = without_critic(GPGSettings, with_advantages, reinforce_loss)
