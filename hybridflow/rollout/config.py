"""Settings of the engines, and of what they generate for each prompt: `rollout:`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.rollout.config import NEUTRAL, RolloutConfig, SamplingConfig
from engine3d.settings import LONGEST_S, MOST_SAMPLES, Settings
from hybridflow.cluster.devices.device_map import MOST_DEVICES
from hybridflow.rollout.adaptive_sampling import PromptSampling, SamplingTable

OnNewWeights = Literal["wait", "continue", "recompute", "resend"]

_CACHE_TARGET = 0.85
_LEASE_AFTER_S = 0.5


class StreamConfig(Settings):
    """Stream of rollouts, generated while models are trained."""

    on_new_weights: OnNewWeights = "recompute"
    """Treatment of responses in flight when weights change. "wait": the transfer waits for their end. With the others a
    response continues with the new weights, and its tokens have several versions: "continue" keeps its KV cache,
    "recompute" computes it again, "resend" aborts the request and sends it again with its tokens."""
    queue: Literal["oldest_first", "freshest_first"] = "oldest_first"
    """Order in which a step takes complete groups, by the version of their oldest token."""
    late: Literal["wait", "evict"] = "wait"
    """Treatment of groups that would be too old for any later step. "wait": the step waits for them. "evict": the step
    does without them, and their prompts are drawn again.
    """
    dynamic_batching: bool = False
    """Adapt the requests in flight at each engine to the free capacity of its KV cache, up to
    `rollout.engine.max_running_requests`. Their number is that limit if false.
    """
    cache_target: float = Field(_CACHE_TARGET, gt=0, le=1)
    """Share of a KV cache that `dynamic_batching` aims to use. A larger share generates faster, and more requests are
    retracted and computed again.
    """
    engine_restarts: int = Field(0, ge=0, le=10_000)
    """Restarts of engines that die or hang, in a run. The other engines continue meanwhile. One failure more ends the
    run.
    """
    left_over: Literal["drop", "carry"] = "drop"
    """Treatment of groups of `rollout.over_sampling` that a step did not take. "drop": they are aborted and their
    prompts drawn again. "carry": they continue, for a later step.
    """

    @model_validator(mode="after")
    def _batches(self) -> StreamConfig:
        if self.cache_target != _CACHE_TARGET and not self.dynamic_batching:
            raise ValueError(
                f"cache_target={self.cache_target:g} without dynamic_batching=true, expected it, or {_CACHE_TARGET:g}"
            )
        return self


class WeightsConfig(Settings):
    """Transfer of weights from the actor to the engines."""

    share: bool = True
    """Share the actor's memory with an engine on its devices, for parameters whose bytes are the same."""
    transport: Literal["auto", "collective"] = "auto"
    """Write into the engine's memory where it can be reached; or send everything over a process group."""
    staging_mb: int = Field(256, ge=2, le=1_000_000)
    """Most memory of a rank, in MB (1e6 bytes), through which weights pass on their way to other nodes."""
    rolling: bool = False
    """Update one engine after another (needs `stream`): each pauses only while its own weights arrive. All engines
    pause until all have the weights if false.
    """
    rolling_engines: int = Field(1, ge=1, le=MOST_DEVICES)
    """Engines that get them at the same time with `rolling`, for an actor that sends faster than one takes in."""
    flush_cache: bool = True
    """Drop the KV cache, which the old weights made, with every new version."""
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_S)
    """Limit of each wait for another rank, in what goes over a process group."""

    @model_validator(mode="after")
    def _rolls(self) -> WeightsConfig:
        if self.rolling_engines > 1 and not self.rolling:
            raise ValueError(f"rolling_engines={self.rolling_engines} without rolling=true, expected it, or 1")
        return self


class RolloutRole(Settings):
    """The engines that generate, and what they generate for each prompt."""

    engine: RolloutConfig = RolloutConfig()
    engines: int | None = Field(None, ge=1, le=MOST_DEVICES)
    """Number of engines; as many as the role's devices hold if null."""
    sampling: SamplingConfig = SamplingConfig()
    adaptive_sampling: tuple[PromptSampling, ...] = ()
    """Other sampling settings by the length of the prompt: rows by rising prompt_tokens, of which the first applies
    that the prompt is not longer than. `sampling` holds for longer prompts, and for evaluation.
    """
    samples_per_prompt: int = Field(8, ge=1, le=MOST_SAMPLES)
    """Responses to each prompt of a step."""
    stream: StreamConfig | None = None
    """Settings of a stream: engines on devices of their own generate without pause, and a step trains on complete
    groups. The engines get all prompts of a step at once, and the step trains on all of them, if null.
    """
    over_sampling: float = Field(0.0, ge=0, le=16)
    """Share of `trainer.prompts_per_step` by which more groups are in flight (needs `stream`). A step takes the first
    complete ones.
    """
    lease: bool = False
    """Lease devices of models to engines while a step waits for its groups (needs `stream`, and devices of models in
    `placement.rollout`). When the step has its groups, the requests in flight there continue at other engines, or in
    the next lease.
    """
    lease_after_s: float = Field(_LEASE_AFTER_S, ge=0, le=LONGEST_S)
    """Seconds that a step waits before it leases devices, as `lease` says. A lease takes time itself."""
    weights: WeightsConfig = WeightsConfig()
    verify_weights: bool = False
    """After every transfer, compare all engines bit for bit with what SGLang loads from an export of the actor."""

    @model_validator(mode="after")
    def _samples(self) -> RolloutRole:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 samples nothing to learn from, expected above 0")
        for name, value in self.sampling.altered.items():
            raise ValueError(
                f"sampling.{name}={value:g} draws tokens from another distribution than the policy's at the sampling "
                "temperature, whose log-probs are learned from: gradient, ratio and KL would be of what was not drawn; "
                f"expected {NEUTRAL[name]:g}, or evaluation.NAME.sampling.{name} for evaluation alone"
            )
        return self

    @model_validator(mode="after")
    def _leases(self) -> RolloutRole:
        if self.lease_after_s != _LEASE_AFTER_S and not self.lease:
            raise ValueError(
                f"lease_after_s={self.lease_after_s:g} without lease=true, expected it, or {_LEASE_AFTER_S:g}"
            )
        if self.stream is not None and self.stream.left_over == "carry" and not self.over_sampling:
            raise ValueError(
                "stream.left_over=carry with over_sampling=0 leaves nothing, expected drop, or some over_sampling"
            )
        return self

    @model_validator(mode="after")
    def _in_order(self) -> RolloutRole:
        SamplingTable.of(self.adaptive_sampling, self.sampling)
        return self

    @model_validator(mode="after")
    def _precision(self) -> RolloutRole:
        others = {
            "weights.share": self.weights.share,
            "lease": self.lease,
            "stream.engine_restarts": self.engine_restarts,
        }
        if self.engine.precision is not None and (given := [name for name, value in others.items() if value]):
            why = "engines hold other bytes than the actor" if given[0] == "weights.share" else "it was not tried"
            expected = "0" if given[0] == "stream.engine_restarts" else "false"
            raise ValueError(f"engine.precision={self.engine.precision} with {given[0]}: {why}; expected {expected}")
        return self

    @model_validator(mode="after")
    def _drafts(self) -> RolloutRole:
        others = {
            "weights.rolling": self.weights.rolling,
            "lease": self.lease,
            "stream.engine_restarts": self.engine_restarts,
        }
        if self.engine.draft_tokens and (given := [name for name, value in others.items() if value]):
            raise ValueError(
                f"engine.draft_tokens={self.engine.draft_tokens} was not tried with {given[0]}, expected one of them"
            )
        return self

    @property
    def sampling_table(self) -> SamplingTable:
        """Sampling settings of the responses of a step."""
        return SamplingTable.of(self.adaptive_sampling, self.sampling)

    @property
    def on_new_weights(self) -> OnNewWeights:
        """Fate of responses in flight when weights change."""
        return "wait" if self.stream is None else self.stream.on_new_weights

    @property
    def engine_restarts(self) -> int:
        """Number of times that an engine may be lost and started again."""
        return 0 if self.stream is None else self.stream.engine_restarts

    @property
    def token_versions(self) -> bool:
        """True if each token has a version of its own."""
        return self.engine.token_versions or self.stream is not None

    @model_validator(mode="after")
    def _streams(self) -> RolloutRole:
        if self.over_sampling and self.stream is None:
            raise ValueError(f"over_sampling={self.over_sampling:g} without a stream, expected stream: {{}}, or 0")
        if self.lease and self.stream is None:
            raise ValueError(
                "lease=true without a stream, where engines on devices of models generate in turn with them anyway; "
                "expected stream: {}, or false"
            )
        if self.stream is not None and self.engine.attention_dp > 1:
            raise ValueError(
                f"engine.attention_dp={self.engine.attention_dp} with a stream, where it was not tried; expected 1, or "
                "stream: null"
            )
        if self.weights.rolling and self.stream is None:
            raise ValueError(
                "weights.rolling=true without a stream, where no engine generates while weights change; expected "
                "stream: {}, or false"
            )
        return self

    def layout(self, devices: int) -> Layout:
        """Return a layout whose data-parallel ranks are the engines on this many devices.

        Raises:
            UserError: the engines do not fill the devices.
        """
        tp = self.engine.tp
        engines = self.engines or max(1, devices // tp)
        if engines * tp != devices:
            raise UserError(
                f"{devices} devices for {engines} engines of tp = {tp} devices each, expected {engines * tp}"
            )
        return Layout(dp=engines)
