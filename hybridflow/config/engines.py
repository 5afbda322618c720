"""Recipes with and without engines: what each needs, and what means nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hybridflow.algorithms.preferences import PreferenceSettings

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe

_OF_ENGINES = ("eval_samples", "eval_temperature", "eval_sampling")
"""Settings of the trainer that are of what engines generate."""


def engine_errors(recipe: Recipe) -> Iterator[str]:
    """What a recipe lacks for its engines; or what it says of engines, rewards and evaluation where none run."""
    name = f"algorithm.name={recipe.algorithm.name}"
    if isinstance(recipe.algorithm, PreferenceSettings) and recipe.trainer.max_staleness:
        yield f"trainer.max_staleness={recipe.trainer.max_staleness} with {name}, which was not tried; expected 0"
    if recipe.algorithm.needs_engines:
        if recipe.placement.rollout is None:
            yield f"placement.rollout is missing: the devices of the engines that {name} needs"
        if recipe.data.source == "pairs":
            yield (
                f"data.source=pairs with {name}, whose responses engines generate; expected data.source=jsonl, or an "
                "algorithm that learns from given responses, such as dpo with algorithm.pairs=file"
            )
        return
    why = f"{name}, which learns from responses that the data have, without engines"
    if getattr(recipe.algorithm, "pairs", None) == "file":
        why = f"{name} and algorithm.pairs=file, which learns from responses that the data have, without engines"
    if recipe.placement.rollout is not None:
        yield f"placement.rollout is set with {why}; expected null, or none of it"
    if found := _others(recipe.rollout, type(recipe.rollout)()):
        yield f"rollout.{found[0]} is set with {why}; expected rollout=null, or none of it"
    default = type(recipe).model_fields["reward"].default
    if recipe.reward is not None and recipe.reward != default:
        yield f"reward is set with {why}; expected null, or none of it"
    if recipe.reward_model is not None:
        yield f"reward_model is set with {why}; expected null, or none of it"
    for setting in _OF_ENGINES:
        default = type(recipe.trainer).model_fields[setting].default
        if getattr(recipe.trainer, setting) != default:
            yield f"trainer.{setting} is set with {why}; expected none of it: an evaluation is of held-out pairs"
    if recipe.data.source == "jsonl":
        yield f"data.source=jsonl with {why}; expected data.source=pairs, or arithmetic"


def _others(settings: BaseModel, default: BaseModel) -> list[str]:
    """The settings that differ from their defaults, by their dotted names."""
    found = []
    for name in type(settings).model_fields:
        own, usual = getattr(settings, name), getattr(default, name)
        if own != usual and isinstance(own, BaseModel) and isinstance(usual, BaseModel):
            found += [f"{name}.{inner}" for inner in _others(own, usual)]
        elif own != usual:
            found.append(name)
    return found
