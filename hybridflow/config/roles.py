"""Settings of the models and the engines: `model:`, `rollout:`, and the roles next to the actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.rollout.config import NEUTRAL, RolloutConfig, SamplingConfig
from engine3d.serving.config import ServerConfig
from engine3d.settings import LONGEST_S, MOST_SAMPLES, AbsolutePath, Settings
from engine3d.training.config import TrainConfig
from hybridflow.cluster.devices.device_map import MOST_DEVICES
from hybridflow.rollout.adaptive_sampling import PromptSampling, SamplingTable
from hybridflow.rollout.stream.config import OnNewWeights, StreamConfig


@dataclass(frozen=True)
class MegatronRole:
    """The role of a Megatron-Core model with the settings that hold for it.

    Args:
        name: of the role.
        train: layout and training.
        setting: the name of `train` in a recipe: "train", or one of the role's own such as "critic.train".
        trained: True if the model is trained.
        offload: True if the model leaves its devices between its turns.
    """

    name: str
    train: TrainConfig
    setting: str
    trained: bool
    offload: bool


class CreateModel(Settings):
    """A model with random weights, made when the run starts."""

    config: dict[str, Any]
    """The HuggingFace `config.json`: `architectures` and the sizes."""
    tokenizer: Literal["characters", "chat"] = "characters"
    """`characters`, one token a character of the arithmetic task; or `chat`, one a printable character of ASCII and a
    line feed, with a chat template."""
    seed: int | None = None
    """Seed of the weights; the run's seed if null."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights on disk."""
    embedding_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Standard deviation of the table of embeddings; the config's `initializer_range` if null. A deep model whose table
    has that makes all tokens alike and sends them to few experts; with 10 it uses them evenly, as trained models do,
    which is what a measurement wants."""

    @model_validator(mode="after")
    def _table_of_its_own(self) -> CreateModel:
        if self.embedding_std is not None and self.config.get("tie_word_embeddings"):
            raise ValueError(
                "embedding_std: the table is the output layer too (tie_word_embeddings: true); expected null"
            )
        return self


class ModelConfig(Settings):
    """The model to train: a HuggingFace directory, or one to be made."""

    path: AbsolutePath | None = None
    """HuggingFace directory of the initial model."""
    create: CreateModel | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> ModelConfig:
        if (self.path is None) == (self.create is None):
            both = "" if self.path is None else "; both are set, and model.create=null removes create"
            raise ValueError(
                f"expected one of path (a HuggingFace directory) and create (a config with random weights){both}"
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
    lease_after_s: float = Field(0.5, ge=0, le=LONGEST_S)
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


class ModelRole(Settings):
    """A Megatron-Core model other than the actor."""

    path: AbsolutePath | None = None
    """HuggingFace directory of its initial weights; the run's initial model if null."""
    train: TrainConfig | None = None
    """Its layout, precision, micro-batches and optimizer; those of the actor if null."""
    offload: bool = False
    """Keep its weights and its optimizer's state in page-locked host memory while other roles compute on its devices;
    the results stay the same, bit for bit."""


class TeacherModel(ModelRole):
    """A language model that is distilled from and not trained."""

    path: AbsolutePath
    """HuggingFace directory of a model of any size and family that has the actor's tokenizer and vocabulary."""
    engine: RolloutConfig | None = None
    """SGLang engines that serve it in place of Megatron-Core, as many as its devices hold: on devices of their own, and
    with the teacher's weights throughout. On Megatron-Core if null."""

    @model_validator(mode="after")
    def _is_on_one_of_them(self) -> Self:
        if self.engine is not None and (self.train is not None or self.offload):
            other = "train" if self.train is not None else "offload"
            raise ValueError(f"{other} is of a teacher on Megatron-Core, and engine is set; expected one of them")
        if self.engine is not None and self.engine.server_args.get("load_format") == "dummy":
            raise ValueError("engine.server_args.load_format=dummy, a teacher with random weights; expected auto")
        for name in ("release_weights", "memory_saver", "token_versions", "precision"):
            if self.engine is not None and getattr(self.engine, name):
                raise ValueError(f"engine.{name} is set, and a teacher keeps its weights throughout; expected none")
        if self.engine is not None and self.engine.kv_cache_dtype is not None:
            raise ValueError(
                f"engine.kv_cache_dtype={self.engine.kv_cache_dtype} was not tried with a teacher; expected null"
            )
        if self.engine is not None and self.engine.routes:
            raise ValueError("engine.routes=true, and a teacher draws no tokens; expected false")
        return self


class JudgeModel(Settings):
    """A model of any family that SGLang serves, which reward functions with `path: judge` ask."""

    path: AbsolutePath
    """HuggingFace directory of the model, with its tokenizer and chat template."""
    engine: ServerConfig = ServerConfig()
    """Settings of each SGLang server. There are as many servers as the devices of `placement.judge` hold."""
    restarts: int = Field(3, ge=0, le=1000)
    """Restarts of each server that dies, before the run ends."""


class ScoringModel(ModelRole):
    """A model with a scalar head that scores responses and is not trained."""

    path: AbsolutePath
    """HuggingFace directory of a model for sequence classification with one label, that has the actor's tokenizer."""
    weight: float = 1.0
    """Weight of its score in the sum of all rewards, or all costs."""
