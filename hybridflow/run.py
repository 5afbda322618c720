"""What a run stands on: its directory, its model and tokenizer, and its examples as tokens."""

from __future__ import annotations

import fcntl
import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from engine3d.models import ModelSpec, initialise_random, load_model_spec, model_spec
from hybridflow.config import Recipe
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS, Example, load_splits
from hybridflow.data.tokenizer import encode_answers, encode_prompts, load_tokenizer, make_character_tokenizer
from hybridflow.settings_file import settings_yaml


@dataclass(frozen=True)
class Prompts:
    """Examples of one phase with their prompts as token ids."""

    examples: list[Example]
    tokens: list[list[int]]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class Run:
    """The unchanging facts of a run.

    Args:
        directory: `<run_dir>/<name>`: logs, metrics and the exported model.
        model_directory: HuggingFace directory of the initial weights.
        answers: response token ids of the supervised examples.
    """

    directory: Path
    model_directory: Path
    tokenizer: PreTrainedTokenizerBase
    train: Prompts
    evaluation: Prompts
    sft: Prompts
    answers: list[list[int]]
    lock: TextIO
    """Held as long as the run goes on."""

    @property
    def log_directory(self) -> Path:
        return self.directory / "logs"


_RECIPE = "recipe.yaml"


def prepare(recipe: Recipe) -> Run:
    """Make the run's directory and model, and encode its examples.

    An earlier run of the same name is kept under another: `<name>.1` and so on.

    Raises:
        UserError: a run of this name is going on, or model, tokenizer or examples do not fit.
    """
    directory = (recipe.run_dir / recipe.name).absolute()
    if recipe.model.path is not None and recipe.model.path.absolute().is_relative_to(directory):
        raise UserError(f"model.path: {recipe.model.path} is in the directory of this run; choose another name")
    lock = claim(directory)
    (directory / _RECIPE).write_text(settings_yaml(recipe))
    model_directory = (recipe.model.path or directory / "initial").absolute()
    if recipe.model.create is not None:
        create_model(recipe, model_directory)
    tokenizer = load_tokenizer(model_directory)
    return Run(directory, model_directory, tokenizer, *encode(recipe, tokenizer, prompt_limit(recipe)), lock)


def claim(directory: Path) -> TextIO:
    """Make an empty directory, with an earlier run's moved aside, and hold it until the returned file is closed.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
        if (directory / _RECIPE).exists():
            number = next(n for n in itertools.count(1) if not directory.with_name(f"{directory.name}.{n}").exists())
            directory.rename(directory.with_name(f"{directory.name}.{number}"))
            directory.mkdir()
            lock.close()
            lock = _lock(directory)
        elif len(list(directory.iterdir())) > 1:
            raise UserError(f"run_dir/name: {directory} holds files that are no run's; choose another name")
    except OSError as error:
        raise UserError(f"run_dir/name: cannot make {directory}: {error.strerror}") from None
    return lock


def _lock(directory: Path) -> TextIO:
    lock = (directory / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"run_dir/name: a run in {directory} is going on; choose another name") from None
    return lock


def initial_spec(recipe: Recipe) -> ModelSpec:
    """The model that the recipe names, from its configuration alone."""
    if recipe.model.path is not None:
        return load_model_spec(recipe.model.path)
    assert recipe.model.create is not None
    return model_spec(recipe.model.create.config)


def prompt_limit(recipe: Recipe) -> int:
    """Most tokens of a prompt: what the context leaves beside the response.

    Raises:
        UserError: the response alone fills the context.
    """
    context = recipe.rollout.engine.context_length or initial_spec(recipe).sizes.max_positions
    response = recipe.rollout.sampling.max_new_tokens
    if response >= context:
        raise UserError(
            f"rollout.sampling.max_new_tokens={response} leaves no room for a prompt in a context of {context} tokens"
        )
    return context - response


def create_model(recipe: Recipe, directory: Path) -> None:
    """Write the recipe's random model and its tokenizer."""
    create = recipe.model.create
    assert create is not None
    seed = recipe.seed if create.seed is None else create.seed
    shutil.rmtree(directory, ignore_errors=True)
    initialise_random(model_spec(create.config), directory, seed, getattr(torch, create.dtype))
    make_character_tokenizer(ARITHMETIC_CHARACTERS, directory)


def encode(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[Prompts, Prompts, Prompts, list[list[int]]]:
    """Training, evaluation and supervised prompts, and the supervised answers, as tokens.

    Raises:
        UserError: naming the prompt that cannot be encoded or is longer than `limit` tokens.
    """
    splits = load_splits(recipe.data)
    evaluation = splits.evaluation[: recipe.trainer.eval_prompts]
    sft = splits.sft if recipe.warmup is not None else []
    phases = [
        Prompts(list(examples), encode_prompts(tokenizer, examples, max_tokens=limit))
        for examples in (splits.train, evaluation, sft)
    ]
    answers = encode_answers(tokenizer, sft, max_tokens=recipe.rollout.sampling.max_new_tokens)
    return phases[0], phases[1], phases[2], answers
