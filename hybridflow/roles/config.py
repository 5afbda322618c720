"""Settings of the roles: `model:`, those next to the actor, and `placement:`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine3d.rollout.config import RolloutConfig
from engine3d.serving.config import ServerConfig
from engine3d.settings import AbsolutePath, Settings
from engine3d.training.config import TrainConfig


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
        for name in ("release_weights", "memory_saver", "token_versions"):
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


class PlacementConfig(Settings):
    """Devices of each role: a device map such as "cuda:0-3", or the name of a pool."""

    pools: dict[str, str] = Field(default_factory=dict)
    """Pools by name; they share no device."""
    actor: str
    """Devices of the actor. Where a recipe names neither these nor pools nor a cluster, actor and engines are on all
    GPUs of the machine in bfloat16, and an engine takes 0.3 of a GPU's free memory; or on `cpu:0` in float32."""
    rollout: str | None = None
    """Devices of the engines. Only where the algorithm needs engines, and then it must be given."""
    reference: str | None = None
    """Only where the algorithm needs a reference policy; the actor's devices if null."""
    teacher: str | None = None
    """Only where the algorithm needs a teacher; the actor's devices if null."""
    critic: str | None = None
    """Only where the algorithm needs a critic; the actor's devices if null."""
    cost_critic: str | None = None
    """Only where the algorithm needs a critic of costs; the critic's devices if null."""
    reward_model: str | None = None
    """Only with a reward model; the reference's devices if null."""
    cost_model: str | None = None
    """Only with a cost model; the reward model's devices if null."""
    judge: str | None = None
    """Only with a judge; devices of its own."""
    reward: str | None = None
    """Devices of the processes that call reward and cost functions, which use no GPU; next to the first rank of rollout
    if null. Only where there are functions.
    """
    cluster: str | None = None
    """Address of a running Ray cluster; one is started on this machine if null."""
    shared_gpus: bool = False
    """Start although others use the run's GPUs: those with more than 2 GB in use are refused otherwise."""

    def roles(self, models: Sequence[str]) -> dict[str, str]:
        """The device map or pool of every role that runs, given the models that run besides the actor."""
        critic, reference = self.critic or self.actor, self.reference or self.actor
        reward_model = self.reward_model or reference
        devices = {
            "actor": self.actor,
            "rollout": self.rollout,
            "reference": reference,
            "teacher": self.teacher or self.actor,
            "judge": self.judge,
            "critic": critic,
            "cost_critic": self.cost_critic or critic,
            "reward_model": reward_model,
            "cost_model": self.cost_model or reward_model,
        }
        roles = {role: text for role in ("actor", "rollout", *models) if (text := devices[role]) is not None}
        return roles | ({"reward": self.reward} if self.reward is not None else {})
