"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from engine3d.settings import Settings
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.kl import KLEstimator
from hybridflow.algorithms.registry import ALGORITHMS, Algorithm, known, names_with

_NEEDED_BY: Mapping[str, str] = {
    "normalise_advantages_by_std": "group_std",
    "gamma": "critic",
    "gae_lambda": "critic",
    "value_clip": "critic",
    "whiten_advantages": "critic",
    "critic_warmup_steps": "critic",
    "cost_limit": "costs",
    "lagrange_initial": "costs",
    "lagrange_lr": "costs",
    "lagrange_min": "costs",
    "lagrange_max": "costs",
}
"""For each key that not every algorithm uses: what is so of those that do, as the registry has it."""
_OF_ADAPTIVE = ("kl_target", "kl_horizon")
"""The keys that only the adaptive controller uses."""


class AlgorithmConfig(Settings):
    """Which algorithm, and its constants. The defaults are those of GRPO with the token-mean loss.

    A key that the chosen algorithm does not use is refused, and is not written when the settings are.
    """

    name: Annotated[str, AfterValidator(known)] = "grpo"
    """One of `registry.ALGORITHMS`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token of negative advantage A at dual_clip * |A|; off when null."""
    normalise_advantages_by_std: bool = True
    """Divide by the standard deviation of the group's rewards; false is Dr. GRPO. Only grpo."""
    loss_aggregation: AggregationMode = "token-mean"
    loss_normalising_length: int | None = Field(default=None, gt=0)
    """Tokens by which "seq-mean-token-sum-norm" divides; needed by that mode and by no other."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence is a penalty. If not set: "loss" with grpo, "reward" with all others."""
    kl_estimator: KLEstimator = "k3"
    """If not set: "k3" in the loss; in the reward "k1", whose gradient is there that of the KL divergence."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether kl_coef stays, or is where a controller starts that keeps the KL divergence near kl_target."""
    kl_target: float | None = Field(default=None, gt=0)
    """The KL divergence from the reference policy to keep, in nats per token. Needed by adaptive."""
    kl_horizon: int = Field(default=10_000, gt=0)
    """Samples in which kl_coef grows e-fold per unit of relative error, which counts as 0.2 at most. Only adaptive."""
    kl_guard: float | None = Field(default=None, gt=0)
    """An update past this KL divergence of the policy from the one before the step, in nats per token, is skipped, and
    the learning rate is reset. Off when null."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward for each token it is away. Only ppo and safe_rlhf."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Generalized advantage estimation: 0 trusts the critic, 1 the rewards. Only ppo and safe_rlhf."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value moves in one step before its loss is clipped; off when null. Only ppo and safe_rlhf."""
    whiten_advantages: bool = True
    """Bring the advantages of a batch (with safe_rlhf, the mixed ones) to mean 0 and standard deviation 1. Only ppo and
    safe_rlhf."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which only the critics learn. Only ppo and safe_rlhf."""

    cost_limit: float = 0.0
    """The mean cost of a response that is allowed. Only safe_rlhf."""
    lagrange_initial: float = Field(default=1.0, gt=0)
    """The Lagrange multiplier, the weight of cost against reward, at the start. Only safe_rlhf."""
    lagrange_lr: float = Field(default=0.1, ge=0)
    """Learning rate of the multiplier's logarithm; 0 keeps the multiplier. Only safe_rlhf."""
    lagrange_min: float = Field(default=0.05, gt=0)
    """The multiplier falls no lower. From 0.05, with costs of 1 above the limit and a lagrange_lr of 0.1, it is back at
    1 after 190 steps. Only safe_rlhf."""
    lagrange_max: float = Field(default=5.0, gt=0)
    """The multiplier grows no larger. Only safe_rlhf."""

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` are needed."""
        return self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a critic's values of the reward are needed."""
        return self.algorithm.critic

    @property
    def needs_cost(self) -> bool:
        """Whether costs, and a critic's values of the cost, are needed."""
        return self.algorithm.costs

    @property
    def algorithm(self) -> Algorithm:
        """What is known of it."""
        return ALGORITHMS[self.name]

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kl_in = data.get("kl_in", "loss" if data.get("name", "grpo") == "grpo" else "reward")
        return {"kl_in": kl_in, "kl_estimator": "k1" if kl_in == "reward" else "k3", **data}

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        refused = [
            f"{key} is set with {setting} {getattr(self, setting)!r}, which does not use it; expected "
            + (f"{setting} {' or '.join(map(repr, users))}, or " if users else "")
            + f"no {key}"
            for key, setting, users in self._unused()
            if key in self.model_fields_set
        ]
        if refused:
            raise ValueError("; ".join(refused))
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
        if self.kl_controller == "adaptive" and (self.kl_target is None or self.kl_coef == 0):
            raise ValueError(
                f"kl_controller is 'adaptive' with kl_target {self.kl_target} and kl_coef {self.kl_coef}, "
                "expected a target, and a coefficient above 0 to start from"
            )
        if not self.lagrange_min <= self.lagrange_initial <= self.lagrange_max:
            raise ValueError(
                f"lagrange_initial is {self.lagrange_initial}, expected between lagrange_min, {self.lagrange_min}, and "
                f"lagrange_max, {self.lagrange_max}"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = {key for key, _, _ in self._unused()}
        return {key: value for key, value in serialize(self).items() if key not in unused}

    def _unused(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Each key without a use, with the setting that decides and its values that use the key."""
        for key, need in _NEEDED_BY.items():
            if not getattr(self.algorithm, need):
                yield key, "name", names_with(**{need: True})
        if self.kl_controller != "adaptive":
            for key in _OF_ADAPTIVE:
                yield key, "kl_controller", ("adaptive",)
