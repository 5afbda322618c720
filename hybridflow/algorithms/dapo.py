"""DAPO: GRPO with clip-higher, dynamic sampling, the mean over tokens, and care for truncated responses
(arXiv:2503.14476)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from engine3d.errors import EngineError
from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.algorithms.advantages.overlong import overlong_penalty
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings, rewarded_samples
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor


class DAPOSettings(DynamicSamplingSettings, ClippedSettings):
    """Settings of DAPO: those of the paper, but for kl_coef and entropy_coef, which are 0 in it."""

    group_baseline: ClassVar[bool] = True

    name: str = "dapo"
    clip_high: float = Field(default=0.28, gt=0)
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"
    dynamic_sampling: bool = True
    overlong_filter: bool = False
    """Leave truncated responses out of the loss. Their rewards count in the baseline of their group and in dynamic
    sampling."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before the most that a response may have within which it is punished for its length, in proportion; no
    punishment if null."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Penalty on the reward of a response of the greatest length."""

    @property
    def compares_with_left_out(self) -> bool:
        return self.overlong_filter

    @property
    def _unused(self) -> dict[str, str]:
        why = "overlong_buffer null, which does not use it; expected overlong_buffer"
        return super()._unused | ({"overlong_penalty": why} if self.overlong_buffer is None else {})


def make_experience(step: Step[DAPOSettings]) -> Experience:
    """Make GRPO's experience from groups whose rewards differ."""
    batch = rewarded_samples(step, in_loss=_not_truncated if step.config.overlong_filter else None)
    return with_advantages(step, Experience(batch))


def with_advantages(step: Step[DAPOSettings], experience: Experience) -> Experience:
    """Compute GRPO's advantages from rewards less the length penalty."""
    batch, config = experience.batch, step.config
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    if config.overlong_buffer is not None:
        penalty = overlong_penalty(
            batch.per_sample["response_lengths"],
            limit=step.response_limits(batch),
            buffer=config.overlong_buffer,
            factor=config.overlong_penalty,
        )
        step.values[metrics.REWARD_OVERLONG] = float(penalty.double().mean())
        rewards = rewards + penalty
    advantages = group_relative_advantages(rewards, batch.per_sample["group_ids"], normalise_by_std=True)
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


def learn(step: Step[DAPOSettings], experience: Experience) -> None:
    """Update the actor, from responses that came to an end if the others are to be left out."""
    batch = experience.batch
    if step.config.overlong_filter:
        batch = batch.select(_not_truncated(batch).nonzero()[:, 0])
        step.values[metrics.SAMPLING_OVERLONG] = 1 - len(batch) / len(experience.batch)
        if len(batch) < step.least_samples:
            raise EngineError(
                f"step {step.number}: {len(experience.batch) - len(batch)} of {len(experience.batch)} responses are "
                f"truncated and out of the loss by algorithm.overlong_filter=true; expected at least "
                f"{step.least_samples} others, a larger rollout.sampling.max_new_tokens, or overlong_filter=false"
            )
    step.update(replace(experience, batch=batch))


def _not_truncated(batch: RemoteBatch) -> Tensor:
    """Return (B,) bool: the responses that came to an end."""
    return batch.per_sample["finish_reasons"] != FinishReason.LENGTH


ALGORITHM = Algorithm(DAPOSettings, make_experience, with_advantages, learn)
