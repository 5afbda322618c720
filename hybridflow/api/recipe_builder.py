"""Recipe of the settings and arguments of the Python API. Nothing here starts or writes anything."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine3d.errors import UserError
from hybridflow.algorithms.config import load
from hybridflow.algorithms.registry import is_known
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.api.config import PPOConfig, mini_batches
from hybridflow.config.machine_defaults import machine_defaults
from hybridflow.config.reading.yaml_loader import Key, SettingsError, build_settings, read_with_bases
from hybridflow.config.recipe import Recipe
from hybridflow.metrics.names import EVAL
from hybridflow.rundir.status.lock import check_free

_KEYS: dict[str, Key] = {
    "algorithm": ("algorithm", "name"),
    "batch_size": ("trainer", "prompts_per_step"),
    "epochs": ("trainer", "epochs"),
    "lr": ("train", "optimizer", "lr"),
    "kl_coef": ("algorithm", "kl_coef"),
    "max_steps": ("trainer", "steps"),
    "samples_per_prompt": ("rollout", "samples_per_prompt"),
    "max_new_tokens": ("rollout", "sampling", "max_new_tokens"),
    "adaptive_sampling": ("rollout", "adaptive_sampling"),
    "actor_device_mapping": ("placement", "actor"),
    "rollout_device_mapping": ("placement", "rollout"),
    "critic_device_mapping": ("placement", "critic"),
}
"""The recipe's key of each setting that stands for one."""

_EPOCHS_OF_DATA: Key = ("trainer", "epochs_of_data")
"""The recipe's other way to say how long a run is."""
_EVALUATED = 64


@dataclass(frozen=True)
class Given:
    """Arguments of a trainer, as a recipe names them.

    Args:
        model: HuggingFace directory of the actor; the recipe's if None.
        reward_model: HuggingFace directory of a reward model.
        reward_name, reward: of the reward function, its name and path.
        prompts, eval_prompts: JSON-lines files; the recipe's data if None.
        number: of prompts.
        passes: over the prompts; `max_steps` alone counts if None.
    """

    model: Path | None = None
    reward_model: Path | None = None
    reward_name: str = "reward"
    reward: str | None = None
    prompts: Path | None = None
    eval_prompts: Path | None = None
    number: int = 0
    passes: int | None = None


@dataclass(frozen=True)
class Base:
    """A recipe's content before it is checked, and where each key was read."""

    data: dict[str, Any]
    locations: dict[Key, str]
    source: str

    @classmethod
    def of(cls, config: PPOConfig) -> Base:
        """The recipe that the settings name.

        Raises:
            SettingsError: the file cannot be read.
        """
        if isinstance(config.recipe, Path):
            data, locations = read_with_bases(config.recipe)
            return cls(data, locations, str(config.recipe))
        return cls(copy.deepcopy(config.recipe or {}), {}, "PPOConfig" if config.recipe is None else "recipe")

    def get(self, key: Key) -> Any:
        """The value of a key, None where it has none."""
        value: Any = self.data
        for name in key:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def has(self, key: Key) -> bool:
        """True if a key is there, or its group is null."""
        group: Any = self.data
        for name in key:
            if not isinstance(group, dict):
                return True
            if name not in group:
                return False
            group = group[name]
        return True

    def put(self, key: Key, value: Any) -> None:
        """Set a key, in place."""
        group = self.data
        for name in key[:-1]:
            if not isinstance(group.get(str(name)), dict):
                group[str(name)] = {}
            group = group[str(name)]
        group[str(key[-1])] = value
        for read in [location_key for location_key in self.locations if location_key[: len(key)] == key]:
            del self.locations[read]

    def drop(self, key: Key) -> None:
        """Take a key away, in place, if it is there."""
        group = self.get(key[:-1])
        if isinstance(group, dict):
            group.pop(str(key[-1]), None)


def make_recipe(config: PPOConfig, given: Given, *, gpus: int) -> Recipe:
    """The recipe of a run.

    Args:
        config: the settings; those that were set come before the recipe's, and these before the defaults.
        given: the rest.
        gpus: of this machine.

    Raises:
        SettingsError: with one line for every error found.
    """
    base = Base.of(config)
    for name in config.model_fields_set & _KEYS.keys():
        if getattr(config, name) is not None:
            base.put(_KEYS[name], getattr(config, name))
    if config.async_rollout:
        for setting, default in ((("rollout", "stream"), {}), (("trainer", "max_staleness"), 1)):
            if not base.get(setting):
                base.put(setting, default)
    if config.use_dynamic_batching:
        if base.get(("rollout", "stream")) is None:
            raise UserError(
                "use_dynamic_batching=true of engines that get all prompts at once; expected async_rollout=true"
            )
        base.put(("rollout", "stream", "dynamic_batching"), True)
    for name, value in (config.checkpoint_config or {}).items():
        base.put(("checkpoint", name), value)
    if "max_steps" in config.model_fields_set or given.passes is not None:
        base.drop(_EPOCHS_OF_DATA)
    _put_given(base, config, given)
    algorithm = base.get(_KEYS["algorithm"]) or config.algorithm
    for key, value in _defaults(config, base, algorithm, gpus, has_own_evaluation=given.eval_prompts is not None):
        if not base.has(key):
            base.put(key, value)
    _put_mini_batches(base, config)
    _put_steps(base, config, given)
    _check_generates(algorithm, base)
    recipe = build_settings(Recipe, base.data, base.locations, base.source)
    if given.passes is not None and getattr(recipe.algorithm, "dynamic_sampling", False):
        raise UserError(
            f"num_epochs={given.passes} with algorithm.dynamic_sampling=true, where a step draws as many prompts as it "
            "needs; expected max_steps, or dynamic_sampling=false"
        )
    return recipe


def _check_generates(algorithm: str, base: Base) -> None:
    """Check that there is something to roll out. Raises SettingsError."""
    if not is_known(algorithm):
        return
    settings = load(algorithm).settings
    given = {name: value for name in settings.model_fields if (value := base.get(("algorithm", name))) is not None}
    with contextlib.suppress(ValidationError):  # which the recipe tells, by its place
        if not settings(**given).needs_engines:
            raise SettingsError(
                [
                    f"algorithm {algorithm} learns from responses that the data have, and generates none; expected "
                    "hybridflow train with a recipe such as launch/recipes/algorithms/dpo.yaml, or another algorithm"
                ]
            )


def run_directory(config: PPOConfig) -> Path:
    """Return the directory of the run of these settings.

    Raises:
        SettingsError: the recipe file cannot be read.
    """
    base = Base.of(config)
    name = base.get(("name",)) or base.get(_KEYS["algorithm"]) or config.algorithm
    return Path(str(base.get(("run_dir",)) or "runs")).absolute() / str(name)


def free_directory(config: PPOConfig) -> Path:
    """Return the directory of the run of these settings, in or beside which nothing of another run is replaced.

    Raises:
        SettingsError: the recipe file cannot be read.
        UserError: it is another run's, which is neither to be resumed nor to be moved aside.
    """
    base, directory = Base.of(config), run_directory(config)
    if base.get(("overwrite",)) is False and base.get(("resume",)) in (None, "none"):
        check_free(directory)
    return directory


def _defaults(
    config: PPOConfig, base: Base, algorithm: str, gpus: int, *, has_own_evaluation: bool
) -> Iterator[tuple[Key, Any]]:
    """Yield the defaults of what neither the settings nor the recipe say."""
    settings = load(algorithm).settings if is_known(algorithm) else AlgorithmSettings
    compared = settings.group_baseline or (is_known(algorithm) and load(algorithm).together > 1)
    unused = {("algorithm", name) for name in settings.not_used}
    for name in _KEYS.keys() - config.model_fields_set:
        if _KEYS[name] in unused:
            continue
        if name == "max_steps" and base.get(_EPOCHS_OF_DATA) is not None:
            continue
        if getattr(config, name) is not None:
            yield _KEYS[name], getattr(config, name)
    yield ("name",), run_directory(config).name
    yield ("overwrite",), True  # a script that runs twice has given no name
    yield ("rollout", "samples_per_prompt"), 8 if compared else 1
    if settings.on_policy and "mini_batch_size" not in config.model_fields_set:
        yield ("trainer", "mini_batches"), 1
    yield from machine_defaults(base.get, gpus)
    if not has_own_evaluation:
        yield ("evaluation", EVAL, "prompts"), _EVALUATED


def _put_given(base: Base, config: PPOConfig, given: Given) -> None:
    """Model, prompts and rewards."""
    if given.model is not None:
        base.put(("model",), {"path": str(given.model)})
    elif not base.has(("model",)):
        raise SettingsError(["no model, expected a HuggingFace directory as model=, or model in the recipe"])
    if given.prompts is not None:
        base.put(("data", "source"), "jsonl")
        files = {"train_path": str(given.prompts), "eval_path": str(given.eval_prompts or given.prompts)}
        base.put(("data", "jsonl"), files)
    elif not base.has(("data",)):
        raise SettingsError(["no prompts, expected train(prompts), PPOTrainer(prompts=...), or data in the recipe"])
    if given.reward_model is not None:
        base.put(("reward_model", "path"), str(given.reward_model))
    scored_by_model = base.get(("reward_model",)) is not None
    if given.reward is not None:
        function = {"name": given.reward_name, "path": given.reward, **config.reward_options}
        base.put(("reward",), {"functions": [function]})
    elif config.reward_options:
        raise SettingsError(["reward_options are of reward_fn, which was not given"])
    elif not base.has(("reward",)) and scored_by_model:
        base.put(("reward",), None)
    elif not base.has(("reward",)) and given.prompts is not None:
        raise SettingsError(["no reward, expected reward_fn=, reward_model=, or reward in the recipe"])
    if config.reward_device_mapping is not None:
        role = "reward_model" if scored_by_model else "reward"
        base.put(("placement", role), config.reward_device_mapping)


def _put_mini_batches(base: Base, config: PPOConfig) -> None:
    """Set the number of mini-batches: the recipe's, if it has one and no size is set."""
    key = ("trainer", "mini_batches")
    if base.has(key) and "mini_batch_size" not in config.model_fields_set:
        return
    batch_size = base.get(_KEYS["batch_size"])
    if not isinstance(batch_size, int) or batch_size < 1:
        return  # refused with the rest
    try:
        base.put(key, mini_batches(batch_size, config.mini_batch_size))
    except ValueError as error:
        raise SettingsError([str(error)]) from None


def _put_steps(base: Base, config: PPOConfig, given: Given) -> None:
    """Whole steps that pass over all prompts as often as was asked for, at most `max_steps` if that is set."""
    if given.passes is None:
        return
    if given.passes < 1:
        raise UserError(f"num_epochs={given.passes}, expected at least 1")
    if not given.number:
        raise UserError("num_epochs counts passes over prompts, and none were given; expected prompts, or max_steps")
    batch_size = base.get(_KEYS["batch_size"])
    if isinstance(batch_size, int) and batch_size > 0:
        steps = -(-given.passes * given.number // batch_size)
        base.put(_KEYS["max_steps"], min(steps, config.max_steps) if "max_steps" in config.model_fields_set else steps)
