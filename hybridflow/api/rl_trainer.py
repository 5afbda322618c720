"""A run in one call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine3d.errors import UserError
from engine3d.platform import platform
from hybridflow.api.config import PPOConfig
from hybridflow.api.input_files import InputFiles, Prompt, RewardFunction, Sources
from hybridflow.api.recipe_builder import Given, free_directory, make_recipe
from hybridflow.checkpoint.set_results import MeasuredSet, summary_of_sets
from hybridflow.config.reading.known_names import API_NAMES, no_attribute
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log
from hybridflow.metrics.names import EVAL
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.rundir.file_names import EXPORT
from hybridflow.trainer.run import train
from hybridflow.trainer.startup.node_checks import check_nodes_of


@dataclass(frozen=True)
class Trained:
    """Result of a run.

    Args:
        directory: of the run, with its metrics and logs.
        model: HuggingFace directory of the trained model; None if the recipe has `trainer.export=false`.
        first, last: measurement of each held-out set, by its name; that of `eval_prompts` is `eval`.
    """

    directory: Path
    model: Path | None
    first: Mapping[str, MeasuredSet]
    last: Mapping[str, MeasuredSet]

    @property
    def reward_before(self) -> float | None:
        """Value of the first measurement of the set `eval`; None where there was none."""
        return self.first[EVAL].value if EVAL in self.first else None

    @property
    def reward_after(self) -> float | None:
        """Value of the last measurement of the set `eval`, if it is another than the first."""
        return self.last[EVAL].value if EVAL in self.last and self.last[EVAL] != self.first[EVAL] else None

    @property
    def evaluated(self) -> str:
        """The measurements, their prompts and steps, as in the run's last lines."""
        return "\n".join(summary_of_sets(self.first, self.last))


class RLTrainer:
    """Trains a model with reinforcement learning.

    Args:
        model: HuggingFace directory, or a loaded `transformers` model. `model_name` and `actor_model` are other names
            for it. The recipe's if not given.
        algorithm: one of `registry.ALGORITHMS`, such as "ppo" and "grpo"; that of the settings if not given.
        config: the settings.
        reward_fn: (generated_texts) -> list of floats; it may also take `prompts` and `answers`. Or the path of a
            function, as a recipe has it. It is called in processes of its own.
        tokenizer: directory or loaded tokenizer; that in the model's directory if not given.
        reward_model: HuggingFace directory or loaded model with a scalar head, whose score is added to the rewards.
        checkpoint_config: that of the settings.

    Raises:
        UserError: an argument that makes no sense, in one line.
    """

    def __init__(
        self,
        model: Any = None,
        algorithm: str | None = None,
        config: PPOConfig | None = None,
        reward_fn: RewardFunction | str | None = None,
        *,
        model_name: Any = None,
        actor_model: Any = None,
        tokenizer: Any = None,
        reward_model: Any = None,
        checkpoint_config: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        refuse_unknown(type(self), others)
        model = _only("model", {"model": model, "model_name": model_name, "actor_model": actor_model})
        self.config = self._given = checked_config(config)
        if algorithm is not None:
            self.config = changed(self.config, algorithm=algorithm)
        if checkpoint_config is not None:
            self.config = changed(self.config, checkpoint_config=checkpoint_config)
        self._sources = Sources(model, tokenizer, reward_fn, reward_model)

    if not TYPE_CHECKING:  # a type checker is to find a method that is not there

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(RLTrainer, name)

    def init_distributed(self, config: PPOConfig | None = None) -> None:
        """Compare the config with the trainer's own: `train` starts all roles itself, and ends them.

        Raises:
            UserError: another config.
        """
        check_same_config(config, self._given, self.config)

    def train(
        self,
        prompts: Sequence[Prompt] | None = None,
        num_epochs: int | None = None,
        *,
        eval_prompts: Sequence[Prompt] | None = None,
    ) -> Trained:
        """One run, from the model that was given. All that it starts has ended when this returns or raises.

        Args:
            prompts: to learn from, texts or {"prompt": ..., "answer": ...}; those of the recipe if not given.
            num_epochs: passes over the prompts; at most `max_steps` steps where the settings say so. If not given,
                `max_steps` steps.
            eval_prompts: to evaluate with. If not given, with 64 of `prompts`, and then what is measured is called that
                of training prompts.

        Raises:
            SettingsError: one line for everything that is wrong, before anything is started.
            UserError: an argument that makes no sense, or a failing reward function.
            EngineError: a role failed.
        """
        files = InputFiles(free_directory(self.config))
        try:
            given = self._sources.write(files, prompts, eval_prompts, num_epochs)
            recipe = checked_recipe(self.config, given)
            outcome = train(recipe)
        finally:
            files.close()
        model = outcome.directory / EXPORT if recipe.trainer.export else None
        return Trained(outcome.directory, model, outcome.first, outcome.last)


def changed(config: PPOConfig, **settings: Any) -> PPOConfig:
    """The config with other settings.

    Raises:
        SettingsError: one line for every setting that is wrong.
    """
    return PPOConfig(**config.model_dump(exclude_unset=True) | settings)


def check_same_config(config: PPOConfig | None, *others: PPOConfig) -> None:
    """Refuse another config than the trainer's own, as it was given or with what was changed by other arguments."""
    if config is not None and config not in others:
        raise UserError("init_distributed: another config than the trainer's, expected the same or none")


def refuse_unknown(trainer: type, arguments: Mapping[str, Any]) -> None:
    """Say of an argument that a trainer does not take where it belongs.

    Raises:
        UserError: there is one.
    """
    for name in arguments:
        taken = [
            parameter for parameter in inspect.signature(trainer).parameters if parameter not in ("others", "unnamed")
        ]
        text = API_NAMES.get(name, f"{trainer.__name__} takes {', '.join(taken)}")
        if name in PPOConfig.model_fields:
            text = f"a setting, as config=PPOConfig({name}=...)"
        raise UserError(f"{trainer.__name__}: unknown argument {name}: {text}")


def checked_config(config: Any) -> PPOConfig:
    """The settings, or their defaults if there are none.

    Raises:
        UserError: it is something else.
    """
    if config is not None and not isinstance(config, PPOConfig):
        raise UserError(f"config: a {type(config).__name__}, expected PPOConfig(...)")
    return config or PPOConfig()


def checked_recipe(config: PPOConfig, given: Given) -> Recipe:
    """The recipe of a run on this machine, or on a cluster, with all that can be checked of it checked.

    Raises:
        SettingsError: one line for everything that is wrong.
        UserError: Ray is running in this process, or something is wrong with the nodes of `placement.cluster`.
        EngineError: one of these nodes does not answer.
    """
    import ray

    if ray.is_initialized():
        raise UserError(
            "Ray is running in this process, for another trainer or by ray.init(), expected it to be shut down"
        )
    recipe = make_recipe(config, given, gpus=platform.gpus)
    for warning in check_recipe(recipe):
        log.info(warning)
    if recipe.placement.cluster is not None:
        check_nodes_of(recipe)
    return recipe


def _only(name: str, arguments: dict[str, Any]) -> Any:
    """The one of these arguments that was given."""
    given = {key: value for key, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: names of one argument, expected only {name}")
    return next(iter(given.values()), None)
