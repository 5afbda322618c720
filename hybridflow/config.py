"""A recipe: every setting of a run, typed and frozen, from a YAML file and `key=value` overrides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.rollout.config import NEUTRAL, Alterations, RolloutConfig, SamplingConfig
from engine3d.settings import LONGEST_S, MOST_SAMPLES, Settings
from engine3d.training.config import OptimizerConfig, TrainConfig
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.data.config import DataConfig
from hybridflow.devices import MOST_DEVICES
from hybridflow.file_names import CHECKPOINTS
from hybridflow.known_names import RECIPE_NAMES
from hybridflow.limits import LimitsConfig
from hybridflow.metrics import MetricsConfig
from hybridflow.recipe_paths import RecipePath
from hybridflow.rewards.config import RewardConfig
from hybridflow.settings_file import load_settings

MOST_STEPS = 1_000_000_000


class CreateModel(Settings):
    """A model with random weights, made when the run starts."""

    config: dict[str, Any]
    """The HuggingFace `config.json`: `architectures` and the sizes."""
    tokenizer: Literal["characters"] = "characters"
    """One token a character of the arithmetic task."""
    seed: int | None = None
    """Of the weights; the run's seed if null."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class ModelConfig(Settings):
    """The model to train: a HuggingFace directory, or one to be made."""

    path: RecipePath | None = None
    create: CreateModel | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> ModelConfig:
        if (self.path is None) == (self.create is None):
            raise ValueError("expected one of path (a HuggingFace directory) and create (a config with random weights)")
        return self


class WeightsConfig(Settings):
    """How weights get from the actor to the engines."""

    share: bool = True
    """Let an engine on the actor's devices use the actor's memory for parameters whose bytes are the same."""
    transport: Literal["auto", "collective"] = "auto"
    """Write into the engine's memory where it can be reached; or send everything over a process group."""
    staging_mb: int = Field(256, ge=2, le=1_000_000)
    """Most memory of a rank, in MB (1e6 bytes), through which weights pass on their way to other nodes."""
    flush_cache: bool = True
    """Drop the KV cache, which the old weights made, with every new version."""
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_S)
    """Limit of each wait for another rank, in what goes over a process group."""


class RolloutRole(Settings):
    """The engines that generate, and what they generate for each prompt."""

    engine: RolloutConfig = RolloutConfig()
    engines: int | None = Field(None, ge=1, le=MOST_DEVICES)
    """Engines side by side; as many as the role's devices hold if null."""
    sampling: SamplingConfig = SamplingConfig()
    samples_per_prompt: int = Field(8, ge=1, le=MOST_SAMPLES)
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
                f"expected {NEUTRAL[name]:g}, or trainer.eval_sampling.{name} for evaluation alone"
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

    path: RecipePath | None = None
    """HuggingFace directory of its initial weights; the run's initial model if null."""
    train: TrainConfig | None = None
    """Its layout, precision, micro-batches and optimizer; those of the actor if null."""
    offload: bool = False
    """Keep its weights and its optimizer's state in page-locked host memory while other roles compute on its devices;
    the results stay the same, bit for bit."""


class ScoringModel(ModelRole):
    """A model with a scalar head that scores whole responses, and does not learn."""

    path: RecipePath
    """HuggingFace directory of a model for sequence classification with one label, that has the actor's tokenizer."""
    weight: float = 1.0
    """Of its score in the sum over all rewards, or all costs."""


class WarmupConfig(Settings):
    """A supervised phase before the first rollout, on the data's supervised examples."""

    steps: int = Field(100, ge=1, le=MOST_STEPS)
    batch_size: int = Field(64, ge=1, le=MOST_SAMPLES)
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)


class ProfileConfig(Settings):
    """Which updates write a trace of what they spend their time on: `profile/step-N-ROLE.json.gz` in the run's
    directory, by the first rank of every role that learns."""

    steps: tuple[Annotated[int, Field(ge=1)], ...]
    """The trainer's steps, from 1, whose first update is traced."""
    micro_batches: int = Field(2, ge=1)
    """How many of its micro-batches, forward and backward: from the second on, or from the first if there are no
    more."""

    @model_validator(mode="after")
    def _some_step(self) -> ProfileConfig:
        if not self.steps:
            raise ValueError("steps=[] traces nothing, expected at least one step; or no profile")
        return self


class TrainerConfig(Settings):
    """The loop."""

    steps: int = Field(100, ge=1, le=MOST_STEPS)
    """Steps of the run; null beside `epochs_of_data`."""
    epochs_of_data: float | None = Field(None, gt=0, le=1e6)
    """Passes over the training prompts, in place of `steps`: as many whole steps as cover them."""
    prompts_per_step: int = Field(64, ge=1, le=MOST_SAMPLES)
    mini_batches: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Optimizer steps that one rollout is divided into."""
    epochs: int = Field(1, ge=1, le=MOST_STEPS)
    """Passes over each rollout."""
    max_staleness: int = Field(0, ge=0, le=1)
    """Versions by which the weights that made a sample may be older than those that learn from it. At 1 the engines
    respond to the next step's prompts while the models learn from this one's; they need devices of their own."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: int | None = Field(None, ge=1)
    """Steps between evaluations; only before the first, if at all, and after the last if null."""
    eval_prompts: int | None = Field(None, ge=1)
    """Held-out prompts of an evaluation; all of them if null."""
    eval_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Responses to each held-out prompt, over which the mean is."""
    eval_temperature: float = Field(0.0, ge=0)
    """Temperature of those responses; 0 takes the most likely token."""
    eval_sampling: Alterations = Alterations()
    """What else those responses are drawn by, from which nothing is learned; the rest is as in rollout.sampling."""
    export: bool = True
    """Write the trained model as a HuggingFace directory at the end."""
    profile: ProfileConfig | None = None
    """Write traces of some updates; none if null."""

    @model_validator(mode="before")
    @classmethod
    def _without_null_steps(cls, data: Any) -> Any:
        """`steps: null` takes away the steps of a base, for `epochs_of_data`."""
        if isinstance(data, Mapping) and data.get("epochs_of_data") is not None and data.get("steps", 0) is None:
            return {name: value for name, value in data.items() if name != "steps"}
        return data

    @model_validator(mode="after")
    def _one_length(self) -> TrainerConfig:
        if self.epochs_of_data is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"epochs_of_data={self.epochs_of_data:g} and steps={self.steps}, expected one of them; "
                "trainer.steps=null takes the steps of a base away"
            )
        if self.epochs_of_data is None:
            self.check_traced(self.steps)
        return self

    @model_serializer(mode="wrap")
    def _without_derived_steps(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        derived = "steps" if self.epochs_of_data is not None else ""
        return {name: value for name, value in serialize(self).items() if name != derived}

    def check_traced(self, steps: int) -> None:
        """Raises ValueError where `profile` names a step that is not run."""
        if self.profile is not None and (last := max(self.profile.steps)) > steps:
            raise ValueError(f"profile.steps has step {last}, and steps={steps}; expected none after the last one")

    def for_prompts(self, count: int) -> TrainerConfig:
        """The same with the number of steps that `epochs_of_data` means for so many training prompts.

        Raises:
            UserError: `profile` names a step beyond the last.
        """
        if self.epochs_of_data is None:
            return self
        steps = math.ceil(self.epochs_of_data * count / self.prompts_per_step)
        try:
            self.check_traced(steps)
        except ValueError as error:
            raise UserError(f"trainer: {error}") from None
        return self.model_copy(update={"steps": steps})

    @property
    def updates_per_step(self) -> int:
        return self.mini_batches * self.epochs


class CheckpointConfig(Settings):
    """What is saved of a run, so that it can be resumed."""

    save_interval: int | None = Field(None, ge=1)
    """Steps between checkpoints; there is one after the last step and one after the warm-up too. None if null."""
    keep_last_k: int | None = Field(None, ge=1)
    """Checkpoints to keep: the oldest goes once a new one is whole. All of them if null."""
    async_save: bool = True
    """Write in the background: training goes on as soon as the state has been copied to host memory."""
    dir: RecipePath | None = None
    """Where checkpoints lie; in the run's directory if null."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a save that fails does to the run."""
    verify: bool = True
    """Compare every piece that a resumed run reads with its checksum."""
    accept: tuple[str, ...] = ()
    """Settings in which a resumed run may contradict its checkpoint, such as seed, tokenizer or data.arithmetic."""

    @property
    def saves_in_background(self) -> bool:
        return self.save_interval is not None and self.async_save


class PlacementConfig(Settings):
    """Which devices each role runs on: a device map such as "cuda:0-3", or the name of a pool."""

    pools: dict[str, str] = Field(default_factory=dict)
    """Pools by name; they share no device."""
    actor: str
    rollout: str
    reference: str | None = None
    """Only where the algorithm needs a reference policy; the actor's devices if null."""
    critic: str | None = None
    """Only where the algorithm needs a critic; the actor's devices if null."""
    cost_critic: str | None = None
    """Only where the algorithm needs a critic of costs; the critic's devices if null."""
    reward_model: str | None = None
    """Only with a reward model; the reference's devices if null."""
    cost_model: str | None = None
    """Only with a cost model; the reward model's devices if null."""
    reward: str | None = None
    """Where the functions of rewards and costs are called, which use no GPU; beside the first rank of rollout if null.
    Only where there are functions."""
    cluster: str | None = None
    """Address of a running Ray cluster; one is started on this machine if null."""
    shared_gpus: bool = False
    """Start although others use the run's GPUs: those with more than 2 GB in use are refused otherwise."""

    def roles(self, models: Sequence[str]) -> dict[str, str]:
        """The device map or pool of every role that runs, given the models that run beside the actor."""
        critic, reference = self.critic or self.actor, self.reference or self.actor
        reward_model = self.reward_model or reference
        found = {
            "actor": self.actor,
            "rollout": self.rollout,
            "reference": reference,
            "critic": critic,
            "cost_critic": self.cost_critic or critic,
            "reward_model": reward_model,
            "cost_model": self.cost_model or reward_model,
        }
        roles = {role: found[role] for role in ("actor", "rollout", *models)}
        return roles | ({"reward": self.reward} if self.reward is not None else {})


class Recipe(Settings):
    """Every setting of a run. Relative paths start from the directory where the command runs; see `recipe_paths`."""

    other_names = RECIPE_NAMES

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**30)
    """Of everything that is drawn; the seeds of parts are added to it."""
    run_dir: Annotated[RecipePath, Field(validate_default=True)] = Path("runs")
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    rollout: RolloutRole = RolloutRole()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reference: ModelRole = ModelRole()
    critic: ModelRole = ModelRole()
    cost_critic: ModelRole = ModelRole()
    data: DataConfig = DataConfig()
    reward: RewardConfig | None = RewardConfig()
    """The reward functions; none if null, and then a reward model is needed."""
    reward_model: ScoringModel | None = None
    """Its score is added to the rewards of the functions."""
    cost: RewardConfig | None = None
    """The cost functions, where the algorithm learns from costs."""
    cost_model: ScoringModel | None = None
    """Its score is added to the costs of the functions."""
    warmup: WarmupConfig | None = None
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig
    metrics: MetricsConfig = MetricsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    resume: Literal["none", "auto"] | RecipePath = "none"
    """Start afresh; go on after the newest whole checkpoint of `checkpoint.dir`, if there is one; or after this one: a
    checkpoint, a directory of them, or a run's directory."""

    @model_validator(mode="after")
    def _evaluation_can_sample(self) -> Recipe:
        try:
            sampling = self.eval_sampling
        except ValidationError as error:
            reason = error.errors()[0]["ctx"]["error"]
            raise ValueError(f"trainer.eval_sampling with trainer.eval_temperature: {reason}") from None
        cut = [name for name in ("top_p", "top_k", "min_p") if name in sampling.altered]
        if cut and sampling.temperature == 0:
            raise ValueError(
                f"trainer.eval_sampling.{cut[0]} is set with trainer.eval_temperature=0, which takes the most likely "
                "token; expected a temperature above 0"
            )
        if sampling.min_p > 0 and self.rollout.engine.deterministic:
            raise ValueError(
                "trainer.eval_sampling.min_p is set with rollout.engine.deterministic=true, where SGLang cannot sample "
                "with it; expected one of them"
            )
        return self

    @property
    def eval_sampling(self) -> SamplingConfig:
        """How the responses of an evaluation are drawn."""
        own = self.trainer.eval_sampling.model_dump() | {"temperature": self.trainer.eval_temperature}
        return SamplingConfig(**self.rollout.sampling.model_dump() | own)

    @model_validator(mode="after")
    def _algorithm_has_what_it_needs(self) -> Recipe:
        if errors := [*self._missing(), *self._unused()]:
            raise ValueError("; ".join(errors))
        return self

    def _missing(self) -> Iterator[str]:
        """What the algorithm needs and the recipe has not."""
        name = self.algorithm.name
        if self.algorithm.algorithm.group_baseline and self.rollout.samples_per_prompt == 1:
            yield (
                f"rollout.samples_per_prompt=1 with algorithm.name={name}, where a group of one learns nothing; "
                "expected at least 2"
            )
        if self.algorithm.kl_guard is not None and self.trainer.updates_per_step == 1:
            yield (
                "algorithm.kl_guard is set with one update a step, which starts from the very policy that it is held "
                "against; expected trainer.mini_batches or epochs above 1, or no kl_guard"
            )
        if self.trainer.max_staleness and self.algorithm.kl_guard is not None:
            yield (
                f"algorithm.kl_guard is set with trainer.max_staleness={self.trainer.max_staleness}, where the policy "
                "before the step did not make the samples; expected 0, or no kl_guard"
            )
        if self.trainer.max_staleness and self.algorithm.algorithm.greedy_baseline:
            yield (
                f"trainer.max_staleness={self.trainer.max_staleness} with algorithm.name={name}, whose baselines are "
                "generated between rollout and update; expected 0"
            )
        samples = self.trainer.prompts_per_step * self.rollout.samples_per_prompt
        if samples > MOST_SAMPLES:
            yield (
                f"trainer.prompts_per_step={self.trainer.prompts_per_step} times rollout.samples_per_prompt="
                f"{self.rollout.samples_per_prompt} are {samples:,} samples a step, expected at most {MOST_SAMPLES:,}"
            )
        if self.algorithm.kl_controller == "adaptive" and self.algorithm.kl_horizon <= samples / 5:
            yield (
                f"algorithm.kl_horizon={self.algorithm.kl_horizon} with {samples} samples a step, by which one step "
                f"could bring the coefficient to 0; expected above {samples // 5}"
            )
        if self.reward is None and self.reward_model is None:
            yield "reward=null and no reward_model, expected at least one of them"
        if self.algorithm.needs_cost and self.cost is None and self.cost_model is None:
            yield f"algorithm.name={name} learns from costs, expected cost.functions or cost_model.path"

    def _unused(self) -> Iterator[str]:
        """What is set for roles that do not run."""
        runs = {"actor", "rollout", *(["reward"] if self.functions else []), *self.models}
        for role in ("reference", "critic", "cost_critic", "reward", "reward_model", "cost_model"):
            if role not in runs and getattr(self.placement, role) is not None:
                yield f"placement.{role} is set, and there is no such role with {self._why_not(role)}"
        for role in ("reference", "critic", "cost_critic", "cost", "cost_model"):
            default = type(self).model_fields[role].default
            if role not in (*runs, *self._costs) and getattr(self, role) != default:
                yield f"{role} is set, and there is no such role with {self._why_not(role)}"

    @property
    def _costs(self) -> tuple[str, ...]:
        return ("cost", "cost_model") if self.algorithm.needs_cost else ()

    def _why_not(self, role: str) -> str:
        if role == "reference":
            return "algorithm.kl_coef=0"
        return f"{role}=null" if role in ("reward", "reward_model") else f"algorithm.name={self.algorithm.name}"

    @property
    def models(self) -> dict[str, ModelRole]:
        """Every Megatron-Core model that runs beside the actor, by its role."""
        algorithm = self.algorithm
        wanted = {
            "reference": self.reference if algorithm.needs_reference else None,
            "critic": self.critic if algorithm.needs_critic else None,
            "cost_critic": self.cost_critic if algorithm.needs_cost else None,
            "reward_model": self.reward_model,
            "cost_model": self.cost_model if algorithm.needs_cost else None,
        }
        return {role: model for role, model in wanted.items() if model is not None}

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that learn."""
        return ("actor", *(role for role in ("critic", "cost_critic") if role in self.models))

    def for_prompts(self, count: int) -> Recipe:
        """The recipe with the steps that `trainer.epochs_of_data` means; see `TrainerConfig.for_prompts`."""
        return self.model_copy(update={"trainer": self.trainer.for_prompts(count)})

    @property
    def offloaded_roles(self) -> tuple[str, ...]:
        """The models that leave their devices between their turns."""
        return tuple(role for role, model in self.models.items() if model.offload)

    @property
    def phase_steps(self) -> dict[str, int]:
        """How many steps each phase of the metrics has, where that is known."""
        return {"train": self.trainer.steps} | ({"sft": self.warmup.steps} if self.warmup is not None else {})

    @property
    def functions(self) -> dict[str, RewardConfig]:
        """The functions of rewards ("reward") and of costs ("cost"), where there are any."""
        wanted = {"reward": self.reward, "cost": self.cost if self.algorithm.needs_cost else None}
        return {what: config for what, config in wanted.items() if config is not None}

    @property
    def scoring(self) -> dict[str, ScoringModel]:
        """The models that score responses, by what their scores are added to: "reward" and "cost"."""
        wanted = {"reward": self.reward_model, "cost": self.cost_model if self.algorithm.needs_cost else None}
        return {what: model for what, model in wanted.items() if model is not None}

    def train_config(self, role: str) -> TrainConfig:
        """How a role's model is laid out and trained."""
        return (self.models[role].train if role != "actor" else None) or self.train

    def train_setting(self, role: str) -> str:
        """The name of the setting that says so."""
        own = role in self.models and self.models[role].train is not None
        return f"{role}.train" if own else "train"

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.run_dir / self.name

    @property
    def checkpoint_directory(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.checkpoint.dir or self.directory / CHECKPOINTS


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `dotted.key=value` overrides.

    Raises:
        SettingsError: with one line for every error found.
    """
    return load_settings(Recipe, path, overrides)
