"""On-policy distillation: a student learns, on what it writes itself, to be a teacher.

The divergence from the teacher is the reward of each token (Thinking Machines Lab, "On-Policy Distillation", 2025,
https://thinkingmachines.ai/blog/on-policy-distillation; MiniLLM, arXiv:2306.08543), or the loss (GKD,
arXiv:2306.13649; Qwen3, arXiv:2505.09388, section 4.5). The teacher is a role of its own, of any size and layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.divergence import Divergence, truncated_divergence
from hybridflow.algorithms.losses.kl import KLEstimator, kl_estimate
from hybridflow.algorithms.losses.policy import CHOSEN_LOGPROBS, PolicyLoss, TokenColumns
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.metrics import names as metrics

_OF_LOSS = ("divergence", "jsd_beta", "top_k", "top_k_of")
_OF_RATIO = ("clip_low", "clip_high", "dual_clip")


class DistillationSettings(ClippedSettings):
    """Settings of on-policy distillation."""

    needs_teacher: ClassVar[bool] = True
    unscheduled: ClassVar[frozenset[str]] = ClippedSettings.unscheduled | {"reward_coef"}  # by it goes `smallest_group`

    name: str = "distillation"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"
    divergence_in: Literal["reward", "loss"] = "reward"
    """"reward": the advantage of a token is log p_teacher - log p_student of it; "loss": the divergence of the two over
    top_k tokens in the place of each token is what is made small."""
    divergence: Divergence = "reverse_kl"
    """Divergence of the loss: KL(student || teacher), KL(teacher || student), or the Jensen-Shannon divergence of GKD.
    """
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture that "jsd" compares both with."""
    top_k: int = Field(default=16, ge=1)
    """Tokens whose log-probs are compared in the place of each; all others count as one more."""
    top_k_of: Literal["teacher", "student"] = "teacher"
    """Model whose most likely tokens are compared. "student" costs another forward pass of the actor."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the rewards, as advantages in their group, added to the divergence; at 0 they are only measured."""
    normalise_advantages_by_std: bool = True
    """Divide the advantages in a group by the standard deviation of its rewards, as GRPO does."""

    @property
    def smallest_group(self) -> int:
        return 2 if self.reward_coef > 0 else 1

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.kl_coef > 0 and self.kl_in == "reward" and self.reward_coef == 0:
            raise ValueError(
                "kl_in is 'reward' with reward_coef 0, where rewards are only measured; expected kl_in 'loss', or a "
                "reward_coef above 0"
            )
        return self

    @property
    def _unused(self) -> dict[str, str]:
        unused = dict(super()._unused)
        if self.divergence_in == "reward":
            unused |= dict.fromkeys(_OF_LOSS, self._other("divergence_in 'loss'"))
        elif self.divergence != "jsd":
            unused |= {"jsd_beta": self._other("divergence 'jsd'")}
        if self.reward_coef == 0:
            unused |= {"normalise_advantages_by_std": self._other("reward_coef above 0")}
            if self.divergence_in == "loss":
                unused |= dict.fromkeys(_OF_RATIO, self._other("reward_coef above 0"))
        return unused


def make_experience(step: Step[DistillationSettings]) -> Experience:
    """Generate responses of the student, read by the teacher."""
    return with_advantages(step, Experience(step.rewards(read_by_teacher(step, step.generate(step.draw())))))


def read_by_teacher(step: Step[DistillationSettings], batch: RemoteBatch) -> RemoteBatch:
    """Add the log-probs that are needed, and the teacher's columns."""
    config, batch = step.config, step.logprobs(batch)
    top_k = config.top_k if config.divergence_in == "loss" else 0
    return step.teacher_logprobs(batch, top_k=top_k, of_student=config.top_k_of == "student")


def with_advantages(step: Step[DistillationSettings], experience: Experience) -> Experience:
    """Compute the advantages of the rewards. The loss adds the teacher's part of each token."""
    config, batch = step.config, experience.batch
    advantages = torch.zeros(len(batch))
    if config.reward_coef > 0:
        rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
        advantages = config.reward_coef * group_relative_advantages(
            rewards, batch.per_sample["group_ids"], normalise_by_std=config.normalise_advantages_by_std
        )
    return replace(experience, batch=batch.with_per_sample(advantages=advantages))


def learn(step: Step[DistillationSettings], experience: Experience) -> None:
    """Update the actor."""
    step.update(experience)


def distillation_loss(columns: TokenColumns, config: DistillationSettings) -> PolicyLoss:
    """Return the clipped surrogate of advantages and, in them or added to the loss, the divergence from the teacher.

        divergence_in "reward":   A_t = A_rewards + log p_teacher(token) - log p_old(token)
                                  loss = clipped_policy_loss(A_t)
        divergence_in "loss":     loss = truncated_divergence + clipped_policy_loss(A_rewards)

    The advantage of a token is that of it alone, its discount of later ones 0, as in Thinking Machines' text, where
    larger ones did not help; MiniLLM sums over the rest of the response. p_old is the policy that made the samples,
    by the trainer's own log-probs where those are of the same weights: with one update a step the ratio is 1 and the
    gradient that of the reverse KL of each token's distribution, estimated from the token that was drawn.

    The loss of "loss" has no importance weight: it is exact at the positions that the student has reached, for any
    policy that drew the tokens there, and the gradient does not go through the sampling (GKD, section 3).

    Means of stats are over the tokens that the policy wrote; k1 and k3 are those of p_old against the teacher.
    """
    teacher, old = columns.column("teacher_logprobs"), columns.old_logprobs
    stats = {
        metrics.DISTILLATION_KL_K1: kl_estimate(old, teacher, "k1"),
        metrics.DISTILLATION_KL_K3: kl_estimate(old, teacher, "k3"),
        metrics.DISTILLATION_AGREEMENT: columns.column("teacher_agrees"),
    }
    if config.divergence_in == "reward":
        columns = replace(columns, advantages=columns.advantages + teacher - old)
    policy = clipped_loss(columns, config)
    loss = policy.loss
    if config.divergence_in == "loss":
        divergence = truncated_divergence(
            columns.column(CHOSEN_LOGPROBS),
            columns.column("teacher_chosen_logprobs"),
            divergence=config.divergence,
            jsd_beta=config.jsd_beta,
        )
        stats[metrics.DISTILLATION_DIVERGENCE] = divergence.where(columns.loss_mask, 0.0)
        loss = loss + divergence
    return PolicyLoss(loss, policy.ratio, {**policy.stats, **stats})


ALGORITHM = Algorithm(
    DistillationSettings, make_experience, with_advantages, learn, distillation_loss, read=read_by_teacher
)
