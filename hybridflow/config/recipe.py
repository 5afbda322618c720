"""A recipe: every setting of a run, typed and frozen, from a YAML file and `key=value` overrides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import NOTHING_LEFT_OUT
from engine3d.rollout.config import RolloutConfig
from engine3d.settings import MOST_SAMPLES, AbsolutePath, Settings
from engine3d.training.config import STATE_SETTINGS, TrainConfig
from hybridflow.algorithms.config import AnyAlgorithm
from hybridflow.algorithms.distillation import DistillationSettings
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.cluster.hosts.network.network_settings import NetworkConfig
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.config.evaluation import EvaluationSet, PlannedSet, keep_best_errors, planned_sets, set_errors
from hybridflow.config.fit.algorithm import misfits, replay_misfits
from hybridflow.config.fit.engines import engine_errors
from hybridflow.config.fit.episodes import episode_errors
from hybridflow.config.machine_defaults import placed_on_machine
from hybridflow.config.reading.known_names import RECIPE_NAMES
from hybridflow.config.reading.yaml_loader import SettingsError, load_settings
from hybridflow.config.run import CheckpointConfig, TrainerConfig, WarmupConfig
from hybridflow.data.config import DataConfig
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.metrics.config import MetricsConfig
from hybridflow.rewards.config import RewardConfig
from hybridflow.roles.config import (
    JudgeModel,
    MegatronRole,
    ModelConfig,
    ModelRole,
    PlacementConfig,
    ScoringModel,
    TeacherModel,
)
from hybridflow.rollout.config import RolloutRole
from hybridflow.rundir.file_names import CHECKPOINTS, RECIPE
from hybridflow.rundir.samples.config import SamplesConfig


class Recipe(Settings):
    """Every setting of a run. Relative paths start from the directory where the command runs; see `recipe_paths`."""

    other_names = RECIPE_NAMES

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its directory is `run_dir/name`. Letters, digits, `.`, `_` and `-`."""
    seed: int = Field(0, ge=0, lt=2**30)
    """Seed of all random numbers. Seeds of single components are added to it."""
    run_dir: Annotated[AbsolutePath, Field(validate_default=True)] = Path("runs")
    """Directory that holds the directories of runs."""
    private: bool = False
    """Keep prompts, samples, logs and weights to this user: the run's directory has mode 700, and every process of the
    run creates directories of mode 700 and files of mode 600, in `checkpoint.dir` too. Others of the host may read them
    if false, as the umask lets them."""
    actor: str | None = Field(None, min_length=1)
    """Name of this actor among the recipe's `actors`; set by a run of several."""
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    rollout: RolloutRole = RolloutRole()
    algorithm: AnyAlgorithm = GRPOSettings()
    reference: ModelRole = ModelRole()
    teacher: TeacherModel | None = None
    """The model that algorithm `distillation` learns from."""
    critic: ModelRole = ModelRole()
    cost_critic: ModelRole = ModelRole()
    data: DataConfig = DataConfig()
    reward: RewardConfig | None = RewardConfig()
    """The reward functions; none if null, and then a reward model is needed."""
    reward_model: ScoringModel | None = None
    """Its score is added to the rewards of the functions."""
    environment: EnvironmentConfig | None = None
    """The environment in which each sample is an episode of several turns, and which gives the reward. A sample is one
    response if null."""
    judge: JudgeModel | None = None
    """The model that functions with `path: judge` ask, where their `arguments` have no `url`."""
    cost: RewardConfig | None = None
    """The cost functions, where the algorithm learns from costs."""
    cost_model: ScoringModel | None = None
    """Its score is added to the costs of the functions."""
    warmup: WarmupConfig | None = None
    trainer: TrainerConfig = TrainerConfig()
    evaluation: dict[str, EvaluationSet | None] = Field(default_factory=dict)
    """Held-out sets by name; each has the settings below. Null takes one of a base away, or `eval`."""
    placement: PlacementConfig
    metrics: MetricsConfig = MetricsConfig()
    samples: SamplesConfig = SamplesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    network: NetworkConfig = NetworkConfig()
    resume: Literal["none", "auto"] | AbsolutePath = "none"
    """Start afresh; resume from the newest complete checkpoint of `checkpoint.dir`, or else from the one that the run
    started from, if there is one; or from this one: a checkpoint, a directory of them, or a run's directory."""
    overwrite: bool = False
    """Start afresh although `run_dir/name` has a run: its directory is kept as `name.1`, `name.2` and so on. A
    checkpoint that `resume` finds comes first."""

    @model_validator(mode="before")
    @classmethod
    def _placed(cls, data: Any) -> Any:
        """Without a placement the roles are on all devices of this machine."""
        return placed_on_machine(data, _gpus) if isinstance(data, Mapping) else data

    @model_validator(mode="before")
    @classmethod
    def _without_null_rollout(cls, data: Any) -> Any:
        """`rollout: null` takes away that of a base, for an algorithm that needs no engines."""
        if isinstance(data, Mapping) and data.get("rollout", 0) is None:
            return {name: value for name, value in data.items() if name != "rollout"}
        return data

    @model_validator(mode="after")
    def _algorithm_has_what_it_needs(self) -> Recipe:
        fitting = [
            *misfits(self.algorithm, self.trainer, self.rollout, self.data),
            *self._of_routing_replay(),
            *self._of_engines(),
            *self._of_episodes(),
            *self._of_sets(),
            *self._of_adapters(),
            *self._of_mtp(),
        ]
        if errors := [*self._missing(), *fitting, *self._unused()]:
            raise ValueError("; ".join(errors))
        return self

    def _of_engines(self) -> Iterator[str]:
        """Yield what is missing for the engines, or set for engines that do not run."""
        usual = (None, type(self).model_fields["reward"].default)
        scored = {"reward": self.reward not in usual, "reward_model": self.reward_model is not None}
        rewards = [name for name, there in scored.items() if there]
        yield from engine_errors(self.algorithm, self.trainer, self.rollout, self.placement, self.data, rewards)
        if self.has_routes:
            yield from (f"rollout.engine.{error}" for error in self.rollout.engine.route_errors())

    def _of_episodes(self) -> Iterator[str]:
        """Yield settings that do not go with episodes."""
        if self.environment is None:
            return
        usual = {
            name: type(self).model_fields[name].default for name in ("reward", "reward_model", "cost", "cost_model")
        }
        others = [name for name, default in usual.items() if getattr(self, name) not in (None, default)]
        yield from episode_errors(
            self.environment,
            self.algorithm,
            self.rollout,
            data=self.data,
            off_policy=self.trainer.off_policy,
            cp=[
                f"{role.setting}.layout.cp={cp}"
                for role in self.megatron_roles.values()
                if (cp := role.train.layout.cp) > 1
            ],
            sets=self.sets,
            has_routes=self.has_routes,
            scored=others,
        )

    def _of_routing_replay(self) -> Iterator[str]:
        """Yield errors of `routing_replay`, of the actor and of models that have none to replay."""
        for role, model in self.models.items():
            if model.train is not None and (mode := model.train.routing_replay) != "none":
                yield f"{role}.train.routing_replay={mode}: expected none, because this model has its own routes"
        if (mode := self.train.routing_replay) == "none":
            return
        yield from replay_misfits(mode, self.algorithm, self.trainer, self.rollout)
        setting = f"train.routing_replay={mode}"
        if self.actor is not None:
            yield f"{setting} with several actors, which was not tried; expected none"

    def _of_sets(self) -> Iterator[str]:
        """Yield errors of the held-out sets, and of a best checkpoint chosen by one of them."""
        yield from set_errors(self.sets, self.data, self.rollout, self.algorithm.name)
        if self.trainer.epochs_of_data is None:
            yield from self.keep_best_errors()

    def keep_best_errors(self) -> Iterator[str]:
        """Why there would be no best checkpoint to keep; see `for_prompts` for the steps of the run."""
        saves_first = self.warmup is not None
        return keep_best_errors(self.checkpoint, self.sets, self.trainer.steps, saves_first=saves_first)

    @property
    def sets(self) -> dict[str, PlannedSet]:
        """The held-out sets by name: those of `evaluation`, and `eval`."""
        pairs = not self.algorithm.needs_engines
        environment = self.environment
        reward = self.reward if environment is None else environment.reward
        return planned_sets(self.evaluation, self.data, self.rollout, reward, pairs=pairs, environment=environment)

    def _missing(self) -> Iterator[str]:
        """Yield what the algorithm needs and the recipe lacks."""
        name = self.algorithm.name
        if (drawn := self.rollout.samples_per_prompt) < (least := self.algorithm.smallest_group):
            yield (
                f"rollout.samples_per_prompt={drawn} with algorithm.name={name}, where a group of "
                f"{'one' if drawn == 1 else drawn} learns nothing; expected at least {least}"
            )
        if self.algorithm.kl_guard is not None and self.trainer.updates_per_step == 1:
            yield (
                "algorithm.kl_guard is set with one update a step, which starts from the very policy that it is held "
                "against; expected trainer.mini_batches or epochs above 1, or no kl_guard"
            )
        samples = self.samples_per_step
        if samples > MOST_SAMPLES:
            responses = f"rollout.samples_per_prompt={self.rollout.samples_per_prompt}"
            responses = responses if self.algorithm.needs_engines else "two responses to each"
            yield (
                f"trainer.prompts_per_step={self.trainer.prompts_per_step} times {responses} are {samples:,} samples a "
                f"step, expected at most {MOST_SAMPLES:,}"
            )
        trained = self.algorithm.most_trained(samples)
        if self.algorithm.kl_controller == "adaptive" and self.algorithm.kl_horizon <= trained / 5:
            yield (
                f"algorithm.kl_horizon={self.algorithm.kl_horizon} with {trained} samples a step, by which one step "
                f"could bring the coefficient to 0; expected above {trained // 5}"
            )
        if self.warmup is not None:
            optimizer, kept = self.warmup.optimizer, self.train.optimizer
            for setting in STATE_SETTINGS:
                given, kept_value = getattr(optimizer, setting), getattr(kept, setting)
                if given and not kept_value:  # what a kept recipe says is the default
                    yield (
                        f"warmup.optimizer.{setting}={given} with train.optimizer.{setting}={kept_value}, by which the "
                        "state of both lies; expected none of its own"
                    )
        if name == "ippo" and self.actor is None:
            yield "algorithm.name=ippo without actors; expected actors: {NAME: {settings}, ...}, or ppo for one actor"
        if self.algorithm.needs_teacher and self.teacher is None:
            yield f"algorithm.name={name} learns from a teacher, expected teacher.path"
        if self.teacher_engine is not None:
            yield from self._wrong_with_teacher_engine()
        if self.algorithm.needs_engines and self.reward is None and self.reward_model is None:
            yield "reward=null and no reward_model, expected at least one of them"
        if self.algorithm.needs_cost and self.cost is None and self.cost_model is None:
            yield f"algorithm.name={name} learns from costs, expected cost.functions or cost_model.path"

        yield from self._wrong_with_judge()

    def _wrong_with_judge(self) -> Iterator[str]:
        """A judge that nobody asks, or that is asked and not there."""
        asking = [
            f"{what}.functions.{function.name}"
            for what, config in self.all_functions.items()
            for function in config.functions
            if function.asks_recipes_judge
        ]
        if asking and self.judge is None:
            yield f"{asking[0]} has path judge without arguments.url, expected one, or judge.path and placement.judge"
        if self.judge is not None and not asking:
            yield "judge is set, and no function asks it; expected one with path: judge, without arguments.url"
        if self.judge is not None and self.placement.judge is None:
            yield "judge is set without placement.judge, expected devices of its own"

    def _wrong_with_teacher_engine(self) -> Iterator[str]:
        """Yield settings that SGLang does not support for log-probs of given tokens."""
        if self.placement.teacher is None:
            yield "teacher.engine is set without placement.teacher, expected devices of its own"
        if (temperature := self.rollout.sampling.temperature) != 1:
            yield (
                f"teacher.engine is set with rollout.sampling.temperature={temperature:g}, and SGLang gives log-probs "
                "of given tokens at 1 alone; expected 1, or teacher.engine=null"
            )
        if isinstance(self.algorithm, DistillationSettings) and self.algorithm.top_k_of == "student":
            yield (
                "teacher.engine is set with algorithm.top_k_of=student, and SGLang gives log-probs of its own most "
                "likely tokens alone; expected teacher, or teacher.engine=null"
            )

    def _unused(self) -> Iterator[str]:
        """Yield settings of roles that do not run."""
        runs = {"actor", *(["reward"] if self.all_functions else []), *self.models, *self.served_roles}
        roles = ("reference", "teacher", "critic", "cost_critic", "reward", "reward_model", "cost_model", "judge")
        for role in roles:
            if role not in runs and getattr(self.placement, role) is not None:
                yield f"placement.{role} is set, and there is no such role with {self._why_not(role)}"
        for role in ("reference", "teacher", "critic", "cost_critic", "cost", "cost_model"):
            default = type(self).model_fields[role].default
            if role not in (*runs, *self._costs) and getattr(self, role) != default:
                yield f"{role} is set, and there is no such role with {self._why_not(role)}"

    def _of_adapters(self) -> Iterator[str]:
        """Yield what does not go with adapters."""
        for role, model in self.models.items():
            if model.train is not None and model.train.lora is not None:
                yield f"{role}.train.lora is set, and adapters are of the actor alone; expected null"
            elif self.train.lora is not None and role in self.trained_roles and model.train is None:
                yield f"train.lora is of the actor alone, and {role}.train is null; expected settings of {role}.train"
        if self.train.lora is None:
            return
        if self.algorithm.needs_reference and self.reference_is_base and self.warmup is not None:
            yield (
                "train.lora with warmup, which trains the adapters, and a reference, which is the actor without them; "
                "expected warmup=null, or a reference.path"
            )

    def _of_mtp(self) -> Iterator[str]:
        """Yield what does not go with training of the layer for multi-token prediction."""
        for role, model in self.models.items():
            if model.train is not None and model.train.mtp is not None:
                yield f"{role}.train.mtp is set, and the layer that drafts is of the actor alone; expected null"
        if self.train.mtp is not None and self.actor is not None:
            yield "train.mtp with several actors, which was not tried; expected null"
        if self.train.mtp is not None and not (self.algorithm.needs_engines and self.rollout.engine.draft_tokens):
            yield (
                "train.mtp trains the layer with which engines draft, and none does; expected "
                "rollout.engine.draft_tokens above 0, or train.mtp=null"
            )

    @property
    def served_adapters(self) -> LoraConfig | None:
        """Adapters that engines get apart from the model; None where there are none, or they are merged.

        Engines that no actor trains for have merged weights.
        """
        lora = self.train.lora
        return lora if lora is not None and lora.engine == "adapter" and self.trains else None

    @property
    def _costs(self) -> tuple[str, ...]:
        return ("cost", "cost_model") if self.algorithm.needs_cost else ()

    def _why_not(self, role: str) -> str:
        if role == "reference" and self.algorithm.needs_reference:
            return "train.lora, where the reference is the actor without its adapters"
        if role == "reference" and "kl_coef" not in self.algorithm.not_used:
            return "algorithm.kl_coef=0"
        return (
            f"{role}=null" if role in ("reward", "reward_model", "judge") else f"algorithm.name={self.algorithm.name}"
        )

    @property
    def models(self) -> dict[str, ModelRole]:
        """Megatron-Core models of the run but the actor, by role."""
        algorithm = self.algorithm
        models = {
            "reference": self.reference if algorithm.needs_reference and not self.reference_is_base else None,
            "teacher": self.teacher if algorithm.needs_teacher and self.teacher_engine is None else None,
            "critic": self.critic if algorithm.needs_critic else None,
            "cost_critic": self.cost_critic if algorithm.needs_cost else None,
            "reward_model": self.reward_model,
            "cost_model": self.cost_model if algorithm.needs_cost else None,
        }
        return {role: model for role, model in models.items() if model is not None}

    @property
    def megatron_roles(self) -> dict[str, MegatronRole]:
        """The actor and every Megatron-Core model next to it, by role."""
        trained, offloaded = self.trained_roles, self.offloaded_roles
        return {
            role: MegatronRole(
                role, self.train_config(role), self.train_setting(role), role in trained, role in offloaded
            )
            for role in ("actor", *self.models)
        }

    @property
    def teacher_engine(self) -> RolloutConfig | None:
        """The engines that serve the teacher, where they do."""
        return self.teacher.engine if self.algorithm.needs_teacher and self.teacher is not None else None

    @property
    def asked_judge(self) -> JudgeModel | None:
        """The judge, where a function asks it."""
        functions = [function for config in self.all_functions.values() for function in config.functions]
        return self.judge if any(function.asks_recipes_judge for function in functions) else None

    @property
    def device_maps(self) -> dict[str, str]:
        """The device map or pool of every role that runs."""
        return self.placement.roles([*self.models, *self.served_roles])

    @property
    def served_roles(self) -> tuple[str, ...]:
        """Models that engines of their own serve, but the actor."""
        models = {"teacher": self.teacher_engine, "judge": self.asked_judge}
        return tuple(role for role, served in models.items() if served is not None)

    @property
    def order_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.seed + self.data.seed

    @property
    def extra_groups(self) -> int:
        """Groups in flight beyond those that the next steps need."""
        return math.ceil(self.rollout.over_sampling * self.trainer.prompts_per_step)

    @property
    def has_routes(self) -> bool:
        """True if engines return the experts of every token."""
        return self.rollout.engine.routes or self.train.routing_replay == "rollout"

    @property
    def groups_in_flight(self) -> int:
        """Prompts to which engines respond at the same time, at most."""
        steps = self.trainer.steps_in_flight if self.rollout.stream is not None else 1
        return steps * self.trainer.prompts_per_step + self.extra_groups

    @property
    def trains(self) -> bool:
        """True if the actor runs and is trained."""
        return True

    @property
    def starts_engines(self) -> bool:
        """True if engines generate in this run."""
        return self.algorithm.needs_engines

    @property
    def runs_ahead(self) -> bool:
        """True if engines generate while models are trained."""
        return self.trainer.off_policy or self.rollout.stream is not None or self.trainer.async_evaluation

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Trained roles."""
        return ("actor", *(role for role in ("critic", "cost_critic") if role in self.models))

    def for_prompts(self, count: int) -> Recipe:
        """The recipe with the steps that `trainer.epochs_of_data` means; see `TrainerConfig.for_prompts`."""
        return self.model_copy(update={"trainer": self.trainer.for_prompts(count)})

    @property
    def samples_per_step(self) -> int:
        """Samples of a step: responses of the engines, or two that the data have to each prompt."""
        responses = self.rollout.samples_per_prompt if self.algorithm.needs_engines else 2
        return self.trainer.prompts_per_step * responses

    @property
    def offloaded_roles(self) -> tuple[str, ...]:
        """The models that leave their devices between their turns."""
        return tuple(role for role, model in self.models.items() if model.offload)

    @property
    def reference_is_base(self) -> bool:
        """True if the reference policy, where there is one, is the actor without its adapters."""
        return self.train.lora is not None and self.reference.path is None

    @property
    def reference_is_warmed_up(self) -> bool:
        """True if the reference policy is the model after the warm-up."""
        return self.warmup is not None and "reference" in self.models and self.reference.path is None

    @property
    def phase_steps(self) -> dict[str, int]:
        """Steps of each phase of the metrics, where their number is known."""
        return {"train": self.trainer.steps} | ({"sft": self.warmup.steps} if self.warmup is not None else {})

    @property
    def functions(self) -> dict[str, RewardConfig]:
        """The functions of rewards ("reward") and of costs ("cost"), where there are any. An environment is one."""
        rewards = self.reward if self.environment is None else self.environment.reward
        rewards = rewards if self.algorithm.needs_engines else None
        configs = {"reward": rewards, "cost": self.cost if self.algorithm.needs_cost else None}
        return {what: config for what, config in configs.items() if config is not None}

    @property
    def all_functions(self) -> dict[str, RewardConfig]:
        """These, and the functions of sets that have rewards of their own, by `PlannedSet.scorer`."""
        scored = [planned for planned in self.sets.values() if planned.settings.reward is not None]
        return self.functions | {
            planned.scorer: planned.reward for planned in scored if planned.scorer and planned.reward
        }

    @property
    def scoring(self) -> dict[str, ScoringModel]:
        """The models that score responses, by what their scores are added to: "reward" and "cost"."""
        models = {"reward": self.reward_model, "cost": self.cost_model if self.algorithm.needs_cost else None}
        return {what: model for what, model in models.items() if model is not None}

    def train_config(self, role: str) -> TrainConfig:
        """Return the layout and training settings of a role's model."""
        if role == "actor":
            return self.train
        # Routes are of the actor's samples and weights, adapters of the actor, and what engines leave in bf16 too.
        others: dict[str, Any] = {"routing_replay": "none", "older_routes": "keep", "lora": None, "mtp": None}
        if self.train.precision is None:
            others["fp8"] = NOTHING_LEFT_OUT
        return self.models[role].train or self.train.model_copy(update=others)

    def train_setting(self, role: str) -> str:
        """The name of the setting that says so."""
        has_settings = role in self.models and self.models[role].train is not None
        return f"{role}.train" if has_settings else "train"

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.run_dir / self.name

    @property
    def checkpoint_directory(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.checkpoint.dir or self.directory / CHECKPOINTS


def _gpus() -> int:
    from engine3d.platform import platform  # only here: it imports what reading a placed recipe does without

    return platform.gpus


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `dotted.key=value` overrides.

    Raises:
        SettingsError: with one line for every error found.
    """
    return load_settings(Recipe, path, overrides)


def load_run_recipe(run: Path, overrides: Sequence[str] = (), *, remedy: str = "") -> Recipe:
    """Read the recipe that a run has kept, which another version may have written, and apply overrides.

    Args:
        run: its directory.
        overrides: `dotted.key=value`.
        remedy: what to give in place of that recipe, for the error.

    Raises:
        SettingsError: with one line for every error found, and one that says what to do with keys of other versions.
    """
    path = run / RECIPE
    try:
        return load_settings(Recipe, path, overrides)
    except SettingsError as error:
        if not any(line.startswith(f"{path}:") and ": unknown key " in line for line in error.lines):
            raise
        other = f", or {remedy}" if remedy else ""
        line = f"{run}: another version wrote its recipe; expected these keys as this version has them"
        raise SettingsError([*error.lines, f"{line}{other}"]) from None
