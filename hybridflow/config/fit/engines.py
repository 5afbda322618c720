"""Recipes with and without engines: what each needs, and what means nothing in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.run import TrainerConfig
from hybridflow.data.config import DataConfig
from hybridflow.roles.config import PlacementConfig
from hybridflow.rollout.config import RolloutRole


def engine_errors(
    algorithm: AlgorithmSettings,
    trainer: TrainerConfig,
    rollout: RolloutRole,
    placement: PlacementConfig,
    data: DataConfig,
    rewards: Sequence[str],
) -> Iterator[str]:
    """Yield what a recipe lacks for its engines, or sets for engines, rewards and evaluation although no engine runs.

    Args:
        algorithm, trainer, rollout, placement, data: of the recipe.
        rewards: the keys of rewards that are set.
    """
    name = f"algorithm.name={algorithm.name}"
    if algorithm.needs_engines:
        if placement.rollout is None:
            yield f"placement.rollout is missing: the devices of the engines that {name} needs"
        if data.source == "pairs":
            yield (
                f"data.source=pairs with {name}, whose responses engines generate; expected data.source=jsonl, or an "
                "algorithm that learns from given responses, such as dpo with algorithm.pairs=file"
            )
        return
    why = f"{name}, which learns from responses that the data have, without engines"
    if getattr(algorithm, "pairs", None) == "file":
        why = f"{name} and algorithm.pairs=file, which learns from responses that the data have, without engines"
    if placement.rollout is not None:
        yield f"placement.rollout is set with {why}; expected null, or none of it"
    if traced := trainer.traced_rollout_steps:
        yield f"trainer.profile.rollout_steps={traced} is set with {why}; expected 0, or none of it"
    if changed := _others(rollout, type(rollout)()):
        yield f"rollout.{changed[0]} is set with {why}; expected rollout=null, or none of it"
    for name in rewards:
        yield f"{name} is set with {why}; expected null, or none of it"
    if trainer.async_evaluation:
        yield f"trainer.async_evaluation=true with {why}; expected false: an evaluation is of held-out pairs"
    if data.source in ("jsonl", "files"):
        yield f"data.source={data.source} with {why}; expected data.source=pairs, or arithmetic"


def _others(settings: BaseModel, default: BaseModel) -> list[str]:
    """The settings that differ from their defaults, by their dotted names."""
    names = []
    for name in type(settings).model_fields:
        value, usual = getattr(settings, name), getattr(default, name)
        if value != usual and isinstance(value, BaseModel) and isinstance(usual, BaseModel):
            names += [f"{name}.{inner}" for inner in _others(value, usual)]
        elif value != usual:
            names.append(name)
    return names
