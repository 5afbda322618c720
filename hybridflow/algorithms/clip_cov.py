"""Clip-Cov: some of the tokens that would lower the entropy most get no gradient (arXiv:2505.22617, section 4.2).

PPO's clipped surrogate with GRPO's advantages; of the tokens whose covariance of log-prob and advantage lies within
bounds, as many as `clip_cov_fraction` of all loss tokens are drawn, and left out of the loss. Needs the roles that
GRPO needs, and a forward pass of the actor before each update but a step's first.

Where this departs from the authors' code, it follows their formula: the bounds belong to the range, and a token whose
ratio PPO clips may be drawn too, whose gradient was 0 already. The draw is seeded by run and step and by a token's
sample and number, so it is the same on any layout, and in each pass of `trainer.epochs`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms import grpo
from hybridflow.algorithms.base import Algorithm, Step
from hybridflow.algorithms.covariance_selection import SELECTED, with_selection
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.losses.selection import token_numbers, uniform_ranks
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

_SALTS = 2**62


class ClipCovSettings(grpo.GroupSettings, ClippedSettings):
    """Settings of Clip-Cov."""

    name: str = "clip_cov"
    clip_cov_fraction: float = Field(default=2e-4, gt=0, le=1)
    """Fraction of a mini-batch's loss tokens that get no gradient: at least one token, where any is within the bounds.
    """
    clip_cov_low: float = 1.0
    """The least covariance of such a token."""
    clip_cov_high: float = 5.0
    """The largest covariance of such a token."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.clip_cov_low > self.clip_cov_high:
            raise ValueError(
                f"clip_cov_low is {self.clip_cov_low} with clip_cov_high {self.clip_cov_high}, expected at most that"
            )
        return self


def prepare(step: Step[ClipCovSettings], mini_batch: RemoteBatch) -> RemoteBatch:
    """Choose the tokens of a mini-batch."""
    salt = int(torch.randint(_SALTS, (), generator=step.generator("clip_cov")))
    return with_selection(step, mini_batch, drawn_within_bounds, step.config.clip_cov_fraction, salt)


def drawn_within_bounds(
    batch: SampleBatch, covariances: Tensor, config: ClipCovSettings, salt: int
) -> tuple[npt.NDArray[np.float64], Tensor]:
    """Order the tokens with a covariance within the bounds at random."""
    lengths = batch.response_lengths
    ranks = uniform_ranks(salt, batch.sample_ids.repeat_interleave(lengths), token_numbers(lengths))
    return ranks, (covariances >= config.clip_cov_low) & (covariances <= config.clip_cov_high)


def clip_cov_loss(columns: TokenColumns, config: ClipCovSettings) -> PolicyLoss:
    """Compute `clipped_loss`, with 0 for the chosen tokens, which count in the divisor of the loss."""
    chosen = columns.column(SELECTED)
    policy = clipped_loss(columns, config)
    return replace(
        policy,
        loss=policy.loss.where(chosen == 0, 0.0),
        stats={**policy.stats, metrics.TRAIN_SELECTED_FRACTION: chosen},
    )


ALGORITHM = Algorithm(
    ClipCovSettings,
    grpo.make_experience,
    grpo.with_advantages,
    grpo.learn,
    policy_loss=clip_cov_loss,
    prepare=prepare,
)
