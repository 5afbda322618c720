"""Pass@k training: rewards sets of k responses that have a right one (arXiv:2508.10751). Needs no other model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from hybridflow.algorithms.advantages.pass_at_k import pass_at_k_advantages
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.without_critic import without_critic
from hybridflow.metrics import names as metrics


class PassAtKSettings(ClippedSettings):
    """Settings of Pass@k training."""

    group_baseline: ClassVar[bool] = True

    name: str = "pass_at_k"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"
    pass_k: int = Field(default=4, ge=1)
    """Responses of a set, which is rewarded if one of them is right; below rollout.samples_per_prompt."""
    right_above: float = 0.0
    """A response is right where its reward is above this."""

    @property
    def smallest_group(self) -> int:
        return self.pass_k + 1

    @model_validator(mode="after")
    def _rewards_alone(self) -> Self:
        if self.kl_in == "reward":
            raise ValueError(
                "kl_in is 'reward' with name 'pass_at_k', which only asks whether a reward is above right_above; "
                "expected 'loss'"
            )
        return self


def with_advantages(step: Step[PassAtKSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response."""
    config, batch = step.config, experience.batch
    right = batch.per_sample["rewards"] > config.right_above
    advantages, passed = pass_at_k_advantages(right, batch.per_sample["group_ids"], config.pass_k)
    if passed is not None:
        step.values[metrics.REWARD_PASS_AT_K] = passed
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


ALGORITHM = without_critic(PassAtKSettings, with_advantages)
