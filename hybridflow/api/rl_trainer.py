"""A run in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.platform import platform
from hybridflow.api.config import PPOConfig
from hybridflow.api.inputs import InputFiles, Prompt, RewardFunction, Sources
from hybridflow.api.recipes import Given, make_recipe, run_directory
from hybridflow.check import check_recipe
from hybridflow.config import Recipe
from hybridflow.run import EXPORT
from hybridflow.trainer import train


@dataclass(frozen=True)
class Trained:
    """What came of a run.

    Args:
        directory: of the run, with its metrics and logs.
        model: HuggingFace directory of the trained model; None if the recipe has `trainer.export=false`.
        reward_before, reward_after: mean reward of responses to the prompts of evaluation.
    """

    directory: Path
    model: Path | None
    reward_before: float
    reward_after: float


class RLTrainer:
    """Trains a model with reinforcement learning.

    Args:
        model: HuggingFace directory, or a loaded `transformers` model. `model_name` and `actor_model` are other names
            for it. The recipe's if not given.
        algorithm: "ppo", "grpo", "remax" or "safe_rlhf"; that of the settings if not given.
        config: the settings.
        reward_fn: (generated_texts) -> list of floats; it may also take `prompts` and `answers`. Or the path of a
            function, as a recipe has it. It is called in processes of its own.
        tokenizer: directory or loaded tokenizer; that in the model's directory if not given.
        reward_model: HuggingFace directory or loaded model with a scalar head, whose score is added to the rewards.

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
    ) -> None:
        model = _only("model", {"model": model, "model_name": model_name, "actor_model": actor_model})
        self.config = checked_config(config)
        if algorithm is not None:
            self.config = PPOConfig(**self.config.model_dump(exclude_unset=True) | {"algorithm": algorithm})
        self._sources = Sources(model, tokenizer, reward_fn, reward_model)

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
            eval_prompts: to evaluate with; 64 of `prompts` if not given.

        Raises:
            SettingsError: one line for everything that is wrong, before anything is started.
            UserError: an argument that makes no sense, or a failing reward function.
            EngineError: a role failed.
        """
        files = InputFiles(run_directory(self.config))
        try:
            given = self._sources.write(files, prompts, eval_prompts, num_epochs)
            recipe = checked_recipe(self.config, given)
            outcome = train(recipe)
        finally:
            files.close()
        model = outcome.directory / EXPORT if recipe.trainer.export else None
        return Trained(outcome.directory, model, outcome.accuracy_before, outcome.accuracy_after)


def checked_config(config: Any) -> PPOConfig:
    """The settings, or their defaults if there are none.

    Raises:
        UserError: it is something else.
    """
    if config is not None and not isinstance(config, PPOConfig):
        raise UserError(f"config: a {type(config).__name__}, expected PPOConfig(...)")
    return config or PPOConfig()


def checked_recipe(config: PPOConfig, given: Given) -> Recipe:
    """The recipe of a run on this machine, with all that can be checked of it checked.

    Raises:
        SettingsError: one line for everything that is wrong.
        UserError: Ray is running in this process.
    """
    import ray

    if ray.is_initialized():
        raise UserError(
            "Ray is running in this process, for another trainer or by ray.init(), expected it to be shut down"
        )
    recipe = make_recipe(config, given, gpus=platform.gpus)
    for warning in check_recipe(recipe):
        print(warning, flush=True)
    return recipe


def _only(name: str, arguments: dict[str, Any]) -> Any:
    """The one of these arguments that was given."""
    given = {key: value for key, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: names of one argument, expected only {name}")
    return next(iter(given.values()), None)
