"""Settings of the algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine3d.settings import Settings
from hybridflow.algorithms.aggregation import AggregationMode
from hybridflow.algorithms.kl import KLEstimator


class AlgorithmConfig(Settings):
    """Which loss, and its constants. The defaults are those of GRPO with the token-mean loss."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token of negative advantage A at dual_clip * |A|; off when null."""
    normalise_advantages_by_std: bool = True
    """Divide by the standard deviation of the group's rewards; false is Dr. GRPO."""
    loss_aggregation: AggregationMode = "token-mean"
    loss_normalising_length: int | None = Field(default=None, gt=0)
    """Tokens by which "seq-mean-token-sum-norm" divides; needed by that mode and by no other."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_estimator: KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` are needed."""
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if (self.loss_aggregation == "seq-mean-token-sum-norm") != (self.loss_normalising_length is not None):
            raise ValueError(
                f"loss_normalising_length is {self.loss_normalising_length} with loss_aggregation "
                f"{self.loss_aggregation!r}, expected a length with 'seq-mean-token-sum-norm' and with no other"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator is 'k1' with kl_in 'loss', where the gradient of k1 is zero in expectation; "
                "expected 'k2' or 'k3', or kl_in 'reward'"
            )
        return self
