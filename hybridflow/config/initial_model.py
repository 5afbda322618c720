"""The initial model of a recipe: its sizes, its tokenizer, and its directory if the run makes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.models import ModelSpec, initialise_random, load_model_spec, model_spec
from engine3d.models.files.random_weights import check_may_be_made
from engine3d.startup.lazy_imports import torch
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS
from hybridflow.data.tokenizer import load_tokenizer, make_character_tokenizer, make_chat_tokenizer
from hybridflow.roles.config import CreateModel, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def initial_spec(model: ModelConfig) -> ModelSpec:
    """Read the sizes of the initial model from its configuration alone."""
    if model.path is not None:
        return load_model_spec(model.path)
    assert model.create is not None
    spec = model_spec(model.create.config)
    check_may_be_made(spec)
    return spec


def initial_tokenizer(model: ModelConfig, scratch: Path) -> tuple[PreTrainedTokenizerBase, Path]:
    """Load the tokenizer, and name the directory of its files; write one of `model.create` into `scratch`."""
    if model.path is not None:
        return load_tokenizer(model.path), model.path
    assert model.create is not None
    return _made_tokenizer(model.create, scratch), scratch


def create_model(model: ModelConfig, directory: Path, *, seed: int) -> None:
    """Write the random model of `model.create` and its tokenizer; `seed` is used if `model.create.seed` is null."""
    create = model.create
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
