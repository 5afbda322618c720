"""Settings that all algorithms share: `algorithm:` in a recipe, but for what one of them adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from engine3d.settings import Settings
from hybridflow.algorithms.corrections.settings import CorrectionSettings
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.kl import STRAIGHT_THROUGH, KLEstimator, value_of
from hybridflow.algorithms.own_files import is_own
from hybridflow.algorithms.registry import known
from hybridflow.algorithms.schedules import Schedule, largest, schedule_errors

_OF_ADAPTIVE = {
    "kl_controller": ("kl_target", "kl_horizon"),
    "entropy_controller": ("entropy_target", "entropy_coef_step", "entropy_coef_max"),
}
"""The keys that only an adaptive controller uses."""
_CONTROLLERS = {"kl_coef": "kl_controller", "entropy_coef": "entropy_controller"}


class AlgorithmSettings(Settings):
    """Name of the algorithm, and the settings that all have. Each algorithm has a subclass of these next to it.

    A key without a use is refused, and is not written when the settings are.
    """

    needs_critic: ClassVar[bool] = False
    """True if a critic's values of the reward are needed."""
    needs_cost: ClassVar[bool] = False
    """True if costs, and a critic's values of the cost, are needed."""
    needs_teacher: ClassVar[bool] = False
    """True if a teacher's log-probs of the responses are needed."""
    group_baseline: ClassVar[bool] = False
    """True if the samples of a prompt are compared with each other."""
    greedy_baseline: ClassVar[bool] = False
    """True if each sample is compared with the most likely response of the same weights."""
    on_policy: ClassVar[bool] = False
    """True if the loss has no ratio, so that it is right on the first update from a rollout alone."""
    needs_old_policy: ClassVar[bool] = False
    """True if the algorithm has no effect where a step's policy is the one that made the samples."""
    unpaired: ClassVar[bool] = False
    """True if one given response to each prompt is enough."""
    unscheduled: ClassVar[frozenset[str]] = frozenset().union(*_OF_ADAPTIVE.values())
    """The settings that a schedule cannot change: read at the start alone, or what is checked before a run rests on
    them."""
    not_used: ClassVar[tuple[str, ...]] = ()
    """Keys that all algorithms have and this one does not use."""

    name: str
    """One of `registry.ALGORITHMS`, or "file.py:NAME" of an algorithm in a file of the user."""
    loss_aggregation: AggregationMode = "token-mean"
    """Aggregation of an update's token losses. If not set: "seq-mean-token-mean" with gspo, gspo_token and sapo,
    "token-mean" with all others.
    """
    loss_normalising_length: int | None = Field(default=None, gt=0)
    """Divisor in tokens of "seq-mean-token-sum-norm", and of no other mode; the most tokens of a response if null:
    rollout.sampling.max_new_tokens, or the largest of rollout.adaptive_sampling."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_controller: Literal["fixed", "adaptive"] = "fixed"
    """"fixed" keeps entropy_coef. "adaptive" starts from it and raises it while the entropy of the policy is below
    entropy_target; above the target there is no bonus (Skywork-OR1, arXiv:2505.22312).
    """
    entropy_target: float | None = Field(default=None, gt=0)
    """The entropy below which there is a bonus, in nats per token. Needed by adaptive."""
    entropy_coef_step: float = Field(default=1e-4, gt=0)
    """Change of entropy_coef in a step. Only adaptive."""
    entropy_coef_max: float = Field(default=5e-3, gt=0)
    """The most that entropy_coef grows to. Only adaptive."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Place of the KL penalty. If not set: "reward" with ppo, ippo, vapo, pf_ppo, safe_rlhf, remax, rloo, opo and
    reinforce_plus_plus, "loss" with all others.
    """
    kl_estimator: KLEstimator = "k1"
    """If not set: "k3" in the loss, "k2" with reinforce_plus_plus_baseline; in the reward "k1", whose gradient is there
    that of the KL divergence. "k1+" and "k3+", only in the loss, have the value of k1 and k3 and the gradient of k2,
    which is that of the KL divergence; k3 has the gradient of the divergence of the other direction."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """"fixed" keeps kl_coef. "adaptive" starts from it and keeps the KL divergence near kl_target."""
    kl_target: float | None = Field(default=None, gt=0)
    """The KL divergence from the reference policy to keep, in nats per token. Needed by adaptive."""
    kl_horizon: int = Field(default=10_000, gt=0)
    """Samples in which kl_coef grows e-fold per unit of relative error, which counts as 0.2 at most. Only adaptive."""
    kl_guard: float | None = Field(default=None, gt=0)
    """An update past this KL divergence of the policy from the one before the step, in nats per token, is skipped, and
    the learning rate is reset. Off when null."""
    correction: CorrectionSettings | None = None
    """Importance weights and masks for tokens that the engines drew from another policy; off when null."""
    schedules: dict[str, Schedule] = Field(default_factory=dict)
    """Settings of the algorithm that change from step to step, by name: {shape: linear or cosine, to: VALUE, over:
    STEPS, after: STEPS} goes from the setting's own value to another, {shape: steps, at: {STEP: VALUE}} changes it at
    given steps. Any number with a bound that is read in every step; each is a metric, such as train/kl_coef."""

    @property
    def needs_reference(self) -> bool:
        """True if `ref_logprobs` are needed in any step."""
        return largest(self.kl_coef, self.schedules.get("kl_coef")) > 0

    @property
    def needs_engines(self) -> bool:
        """True if engines generate the samples to train on. Otherwise the data have them."""
        return True

    def normalising_length(self, limit: int) -> int | None:
        """Return the loss's divisor in tokens, given the most tokens of a response; None with a mode without one."""
        if self.loss_aggregation != "seq-mean-token-sum-norm":
            return None
        return self.loss_normalising_length or limit

    @property
    def smallest_group(self) -> int:
        """Least samples of a prompt that an update can train on."""
        return 2 if self.group_baseline else 1

    @field_validator("name")
    @classmethod
    def _is_its_own(cls, name: str) -> str:
        default = cls.model_fields["name"].default
        if is_own(name):  # whose class is that of its file, see `config.load`
            return known(name)
        if known(name) != default:
            raise ValueError(f"{name!r} with the settings of {default!r}, expected {default!r}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "kl_in" in cls.not_used:
            return data
        kl_in = data.get("kl_in", cls.model_fields["kl_in"].default)
        of_loss = cls.model_fields["kl_estimator"].default
        of_loss = "k3" if of_loss == "k1" else of_loss
        return {"kl_in": kl_in, "kl_estimator": "k1" if kl_in == "reward" else of_loss, **data}

    @model_validator(mode="after")
    def _check(self) -> Self:
        refused = [
            f"{key} is set with {why}, or no {key}" for key, why in self._unused.items() if key in self.model_fields_set
        ]
        if refused:
            raise ValueError("; ".join(refused))
        if self.loss_aggregation != "seq-mean-token-sum-norm" and self.loss_normalising_length is not None:
            raise ValueError(
                f"loss_normalising_length is {self.loss_normalising_length} with loss_aggregation "
                f"{self.loss_aggregation!r}, expected 'seq-mean-token-sum-norm', or no length"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator is 'k1' with kl_in 'loss', where the gradient of k1 is zero in expectation; "
                "expected 'k2', 'k3', 'k1+' or 'k3+', or kl_in 'reward'"
            )
        if self.kl_in == "reward" and self.kl_estimator in STRAIGHT_THROUGH:
            raise ValueError(
                f"kl_estimator is {self.kl_estimator!r} with kl_in 'reward', where an estimator has no gradient; "
                f"expected {value_of(self.kl_estimator)!r}, or kl_in 'loss'"
            )
        if self.kl_controller == "adaptive" and (self.kl_target is None or self.kl_coef == 0):
            raise ValueError(
                f"kl_controller is 'adaptive' with kl_target {self.kl_target} and kl_coef {self.kl_coef}, "
                "expected a target, and a coefficient above 0 to start from"
            )
        if self.entropy_controller == "adaptive":
            if self.entropy_target is None:
                raise ValueError("entropy_controller is 'adaptive' with entropy_target null, expected a target")
            if self.entropy_coef > self.entropy_coef_max:
                raise ValueError(
                    f"entropy_coef is {self.entropy_coef} with entropy_coef_max {self.entropy_coef_max}, expected at "
                    "most that to start from"
                )
        for error in schedule_errors(
            self, self.schedules, unscheduled=self.unscheduled, unused=self._unused, controllers=_CONTROLLERS
        ):
            raise ValueError(error)
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key not in self._unused}

    def least_kept(self, samples_per_prompt: int) -> int:
        """Return the least samples of a prompt that are trained on, where all of them have a reward."""
        return samples_per_prompt

    def most_trained(self, samples: int) -> int:
        """Return the most samples that a step trains on, of which `samples` are its own."""
        return samples

    @property
    def kept_samples(self) -> int:
        """The most samples that the driver keeps in its host's memory for later steps."""
        return 0

    @property
    def compares_with_left_out(self) -> bool:
        """True if advantages depend on samples of the step that it does not train on, apart from
        `Experience.baselines`.
        """
        return False

    @property
    def _unused(self) -> dict[str, str]:
        """Keys without a use, with the setting that disables them and the one that would enable them."""
        of_adaptive = {
            key: self._other(f"{controller} 'adaptive'")
            for controller, keys in _OF_ADAPTIVE.items()
            if getattr(self, controller) == "fixed"
            for key in keys
        }
        return of_adaptive | dict.fromkeys(
            self.not_used, f"name {self.name!r}, which does not use it; expected another name"
        )

    def _other(self, user: str) -> str:
        """Describe the setting that makes a key unused: the one that `user` begins with, which has another value."""
        setting = user.split()[0]
        return f"{setting} {getattr(self, setting)!r}, which does not use it; expected {user}"


class ClippedSettings(AlgorithmSettings):
    """Settings of an algorithm with PPO's clipped surrogate."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token of negative advantage A at dual_clip * |A|; off when null."""
