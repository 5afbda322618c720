"""Settings of the models and the engines: `model:`, `rollout:`, and the roles beside the actor."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.rollout.config import NEUTRAL, RolloutConfig, SamplingConfig
from engine3d.serving.config import ServerConfig
from engine3d.settings import LONGEST_S, MOST_SAMPLES, AbsolutePath, Settings
from engine3d.training.config import TrainConfig
from hybridflow.cluster.devices.device_map import MOST_DEVICES
from hybridflow.config.adaptive_sampling import PromptSampling, SamplingTable
from hybridflow.config.stream import StreamConfig


class CreateModel(Settings):
    """A model with random weights, made when the run starts."""

    config: dict[str, Any]
    """The HuggingFace `config.json`: `architectures` and the sizes."""
    tokenizer: Literal["characters", "chat"] = "characters"
    """`characters`, one token a character of the arithmetic task; or `chat`, one a printable character of ASCII and a
    line feed, with a chat template."""
    seed: int | None = None
    """Of the weights; the run's seed if null."""
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
    """How weights get from the actor to the engines."""

    share: bool = True
    """Let an engine on the actor's devices use the actor's memory for parameters whose bytes are the same."""
    transport: Literal["auto", "collective"] = "auto"
    """Write into the engine's memory where it can be reached; or send everything over a process group."""
    staging_mb: int = Field(256, ge=2, le=1_000_000)
    """Most memory of a rank, in MB (1e6 bytes), through which weights pass on their way to other nodes."""
    rolling: bool = False
    """With `stream`: one engine after another gets the weights, and pauses only while its own arrive; the others go on.
    All engines pause until all have them if false."""
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
    """Engines side by side; as many as the role's devices hold if null."""
    sampling: SamplingConfig = SamplingConfig()
    adaptive_sampling: tuple[PromptSampling, ...] = ()
    """A table of what is drawn otherwise, by the length of the prompt: rows by rising prompt_tokens, of which the first
    holds that the prompt is not longer than. `sampling` holds for longer prompts, and for evaluation."""
    samples_per_prompt: int = Field(8, ge=1, le=MOST_SAMPLES)
    """Responses to each prompt of a step."""
    stream: StreamConfig | None = None
    """Rollouts come one by one, from engines on devices of their own, and a step learns from the groups that are whole.
    All prompts of a step at once, and a step from all of them, if null."""
    over_sampling: float = Field(0.0, ge=0, le=16)
    """With `stream`: by what share of `trainer.prompts_per_step` more groups are under way, of which a step takes the
    first that are whole."""
    lend: bool = False
    """With `stream`, and `placement.rollout` on devices of models too: the engines on those generate while a step waits
    for its groups. As it begins, what they have under way goes on at other engines, or waits for the next time."""
    lend_after_s: float = Field(0.5, ge=0, le=LONGEST_S)
    """With `lend`: for how many seconds a step waits before; lending takes time itself."""
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

    @property
    def sampling_table(self) -> SamplingTable:
        """How the responses of a step are drawn."""
        return SamplingTable.of(self.adaptive_sampling, self.sampling)

    @model_validator(mode="after")
    def _streams(self) -> RolloutRole:
        if self.over_sampling and self.stream is None:
            raise ValueError(f"over_sampling={self.over_sampling:g} without a stream, expected stream: {{}}, or 0")
        if self.lend and self.stream is None:
            raise ValueError(
                "lend=true without a stream, where engines on devices of models generate in turn with them anyway; "
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
        """Engines side by side, as the data-parallel ranks of a layout, on so many devices.

        Raises:
            UserError: the engines do not fill the devices.
        """
        each = self.engine.tp
        engines = self.engines or max(1, devices // each)
        if engines * each != devices:
            raise UserError(
                f"{devices} devices for {engines} engines of tp = {each} devices each, expected {engines * each}"
            )
        return Layout(dp=engines)


class ModelRole(Settings):
    """A Megatron-Core model beside the actor."""

    path: AbsolutePath | None = None
    """HuggingFace directory of its initial weights; the run's initial model if null."""
    train: TrainConfig | None = None
    """Its layout, precision, micro-batches and optimizer; those of the actor if null."""
    offload: bool = False
    """Keep its weights and its optimizer's state in page-locked host memory while other roles compute on its devices;
    the results stay the same, bit for bit."""


class TeacherModel(ModelRole):
    """A language model that is distilled from, and does not learn."""

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
        for name in ("release_weights", "memory_saver", "token_versions"):
            if self.engine is not None and getattr(self.engine, name):
                raise ValueError(f"engine.{name} is set, and a teacher keeps its weights throughout; expected none")
        return self


class JudgeModel(Settings):
    """A model of any family that SGLang serves, which reward functions with `path: judge` ask."""

    path: AbsolutePath
    """HuggingFace directory of the model, with its tokenizer and chat template."""
    engine: ServerConfig = ServerConfig()
    """Of each SGLang server; there are as many as the devices of `placement.judge` hold."""
    restarts: int = Field(3, ge=0, le=1000)
    """How often each server is started again when it dies, before the run ends."""


class ScoringModel(ModelRole):
    """A model with a scalar head that scores whole responses, and does not learn."""

    path: AbsolutePath
    """HuggingFace directory of a model for sequence classification with one label, that has the actor's tokenizer."""
    weight: float = 1.0
    """Of its score in the sum over all rewards, or all costs."""
