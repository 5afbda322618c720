"""Keeping the policy near: the KL penalty's coefficient, and a guard against updates that went too far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybridflow.algorithms.losses.kl import kl_penalty
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_ERROR = 0.2


class FixedKL:
    """A coefficient that stays what the settings say."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, from which an adaptive controller may start."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing: the settings hold, also if they have changed."""


class AdaptiveKL:
    """A coefficient that is turned up while the KL divergence is above its target, and down while it is below.

    Args:
        coef: to start from, above 0.
        target: of the KL divergence from the reference policy, in the unit of `update`.
        horizon: samples in which the coefficient grows e-fold per unit of error.
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self._target, self._horizon = target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Update the coefficient with the mean KL divergence of `samples` samples: `train/reference_kl` of the step.

            error = clip(kl / target - 1, -0.2, 0.2)
            coef <- coef * (1 + error * samples / horizon)      Ziegler et al., arXiv:1909.08593, section 2.2

        There samples / horizon is the constant K_beta, 0.1. Raises ValueError for a KL divergence that is nan, and for
        too many samples, with which the coefficient could reach 0.
        """
        if math.isnan(kl):
            raise ValueError("adaptive KL: the KL divergence is nan, expected a number")
        if samples * _LARGEST_ERROR >= self._horizon:
            raise ValueError(
                f"adaptive KL: {samples} samples at once with kl_horizon {self._horizon}, "
                f"expected a horizon above {samples * _LARGEST_ERROR:.0f}"
            )
        error = min(max(kl / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.coef *= 1 + error * samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, without the settings."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state`."""
        self.coef = state["coef"]


KLController = FixedKL | AdaptiveKL


def make_kl_controller(config: AlgorithmSettings) -> KLController:
    """Make the controller of the settings.

    Its coefficient is used in place of the settings' own: `config.model_copy(update={"kl_coef": controller.coef})`.
    """
    if config.kl_controller == "fixed":
        return FixedKL(config.kl_coef)
    assert config.kl_target is not None
    return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)


def reward_kl(batch: SampleBatch, config: AlgorithmSettings) -> Tensor | None:
    """Return the (R,) float32 KL divergence from the reference policy for the rewards; None if they have no penalty.

    Estimated with the trainer's `old_logprobs` where present, else with the `logprobs` of the rollout. What stands
    outside the response mask has no meaning. Raises ValueError if `ref_logprobs` are needed and missing.
    """
    if not (config.needs_reference and config.kl_in == "reward"):
        return None
    if batch.ref_logprobs is None:
        raise ValueError("reward_kl: kl_coef > 0 with kl_in 'reward', and the batch has no ref_logprobs")
    logprobs = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
    return kl_penalty(logprobs, batch.ref_logprobs, config.kl_estimator)


def sequence_kl(batch: SampleBatch, *, config: AlgorithmSettings) -> Columns:
    """Sum `reward_kl` over the loss tokens of each sample: per-sample column `kl`, (b,), a penalty of its reward."""
    kl = reward_kl(batch, config)
    assert kl is not None
    return Columns(per_sample={"kl": batch.padded(kl.where(batch.response_mask, 0.0)).sum(dim=1)})


class KLGuard:
    """Says when an update has gone too far from the policy that the step began with.

    The measure is the KL divergence from that policy, not from the reference: an update that is skipped leaves the
    latter as it was, so that every update after it would be skipped too.

    Args:
        limit: the most KL divergence, in nats per token; None never trips.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit

    def trips(self, kl: float) -> bool:
        """True if `kl` is past the limit. A NaN is past any limit."""
        return self._limit is not None and not kl <= self._limit
