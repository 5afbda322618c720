"""The model that a recipe names, before it is trained: its facts, its tokenizer, and its directory if it is made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.models import ModelSpec, initialise_random, load_model_spec, model_spec
from engine3d.startup.lazy_imports import torch
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import CreateModel
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS
from hybridflow.data.tokenizer import load_tokenizer, make_character_tokenizer, make_chat_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def initial_spec(recipe: Recipe) -> ModelSpec:
    """The model that the recipe names, from its configuration alone."""
    if recipe.model.path is not None:
        return load_model_spec(recipe.model.path)
    assert recipe.model.create is not None
    return model_spec(recipe.model.create.config)


def initial_tokenizer(recipe: Recipe, scratch: Path) -> tuple[PreTrainedTokenizerBase, Path]:
    """The tokenizer that the recipe names and the directory of its files; one to be made is made in `scratch`."""
    if recipe.model.path is not None:
        return load_tokenizer(recipe.model.path), recipe.model.path
    assert recipe.model.create is not None
    return _made_tokenizer(recipe.model.create, scratch), scratch


def create_model(recipe: Recipe, directory: Path, *, seed: int) -> None:
    """Write the recipe's random model and its tokenizer; `seed` is of the weights where `model.create.seed` is null."""
    create = recipe.model.create
    assert create is not None
    seed = seed if create.seed is None else create.seed
    shutil.rmtree(directory, ignore_errors=True)
    spec, dtype = model_spec(create.config), getattr(torch, create.dtype)
    initialise_random(spec, directory, seed, dtype, embedding_std=create.embedding_std)
    _made_tokenizer(create, directory)


def _made_tokenizer(create: CreateModel, directory: Path) -> PreTrainedTokenizerBase:
    if create.tokenizer == "chat":
        return make_chat_tokenizer(directory)
    return make_character_tokenizer(ARITHMETIC_CHARACTERS, directory)
