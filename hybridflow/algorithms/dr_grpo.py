"""Dr. GRPO: GRPO without the two divisions that bias it (arXiv:2503.20783). Needs no other model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.turn_credit import has_turns, with_turn_advantages
from hybridflow.algorithms.without_critic import without_critic


class DrGRPOSettings(DynamicSamplingSettings, ClippedSettings):
    """Settings of Dr. GRPO.

    Advantages are not divided by the standard deviation of the group's rewards, which would favour prompts that are
    nearly always or never solved. The sum over tokens is divided by one constant, and not by the length of a response,
    which would favour short right and long wrong ones.
    """

    group_baseline: ClassVar[bool] = True

    name: str = "dr_grpo"
    loss_aggregation: AggregationMode = "seq-mean-token-sum-norm"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"

    @model_validator(mode="after")
    def _no_length_bias(self) -> Self:
        if self.loss_aggregation in ("token-mean", "seq-mean-token-mean"):
            raise ValueError(
                f"loss_aggregation is {self.loss_aggregation!r} with name 'dr_grpo', which divides by no length of "
                "responses; expected 'seq-mean-token-sum-norm' or 'seq-mean-token-sum', or name 'grpo' with "
                "normalise_advantages_by_std false"
            )
        return self


def with_advantages(step: Step[DrGRPOSettings], experience: Experience) -> Experience:
    """Give each token the advantage of its response, or of its turn where these have returns."""
    batch = experience.batch
    if has_turns(batch):
        return replace(experience, batch=with_turn_advantages(step, batch, normalise_by_std=False))
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    advantages = group_relative_advantages(rewards, batch.per_sample["group_ids"], normalise_by_std=False)
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


ALGORITHM = without_critic(DrGRPOSettings, with_advantages)
