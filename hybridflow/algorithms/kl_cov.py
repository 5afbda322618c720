"""KL-Cov: tokens that would lower the entropy most are held near the policy before the step (arXiv:2505.22617, 4.2).

The surrogate of the ratio, without clipping, with GRPO's advantages; the tokens with the largest covariance of log-prob
and advantage, `kl_cov_fraction` of all that count, have a penalty on their divergence from the old policy. It is 0, and
so is its gradient, where the policy is the old one: a step needs more than one update, or an older policy's samples.
Needs the roles that GRPO needs, and a forward pass of the actor before each update but a step's first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms import grpo
from hybridflow.algorithms.base import Algorithm, Step
from hybridflow.algorithms.covariance_selection import SELECTED, with_selection
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.losses.weighted import token_ratios
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class KLCovSettings(grpo.GroupSettings):
    """Settings of KL-Cov."""

    needs_old_policy: ClassVar[bool] = True

    name: str = "kl_cov"
    kl_cov_fraction: float = Field(default=2e-4, gt=0, le=1)
    """Fraction of a mini-batch's loss tokens that have the penalty: at least one token. In the paper 2e-3 for a model
    of 7 billion parameters and 2e-4 for one of 32.
    """
    kl_cov_coef: float = Field(default=1.0, gt=0)
    """Weight of their divergence from the policy before the step."""


def prepare(step: Step[KLCovSettings], mini_batch: RemoteBatch) -> RemoteBatch:
    """Choose the tokens of a mini-batch."""
    return with_selection(step, mini_batch, largest_first, step.config.kl_cov_fraction)


def largest_first(
    batch: SampleBatch, covariances: Tensor, config: KLCovSettings, salt: int
) -> tuple[npt.NDArray[np.float64], Tensor]:
    """Order all tokens by falling covariance."""
    return (-covariances).numpy(), torch.ones(len(covariances), dtype=torch.bool)


def kl_cov_loss(columns: TokenColumns, config: KLCovSettings) -> PolicyLoss:
    """Compute the surrogate, and the penalty of the chosen tokens.

        loss_t = -ratio_t A_t + kl_cov_coef |log pi(token_t) - log pi_old(token_t)| [t is chosen]

    The paper writes KL(pi_old || pi); its authors' code and verl take the size of the log-ratio for it, whose gradient
    pulls a chosen token back from either side, and so does this.
    """
    chosen, ratio = columns.column(SELECTED), token_ratios(columns)
    divergence = (columns.logprobs - columns.old_logprobs).abs()
    loss = -ratio * columns.advantages + config.kl_cov_coef * divergence * chosen
    return PolicyLoss(loss, ratio.detach(), {metrics.TRAIN_SELECTED_FRACTION: chosen})


ALGORITHM = Algorithm(
    KLCovSettings, grpo.make_experience, grpo.with_advantages, grpo.learn, policy_loss=kl_cov_loss, prepare=prepare
)
