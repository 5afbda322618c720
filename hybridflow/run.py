"""What a run stands on: its directory, its model and tokenizer, and its examples as tokens."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from engine3d.errors import EngineError, UserError
from hybridflow.config import Recipe
from hybridflow.contradictions import input_checksums
from hybridflow.data.tasks import Example, load_splits
from hybridflow.data.tokenizer import encode_answers, fit_prompts, load_tokenizer
from hybridflow.file_names import RECIPE
from hybridflow.initial_model import create_model, initial_spec
from hybridflow.resume import RUN_IDENTITY, Resumption, find_resumption, keep_warmed_up
from hybridflow.settings_file import settings_yaml
from hybridflow.surroundings import check_interpreter, check_open_files


@dataclass(frozen=True)
class Prompts:
    """Examples of one phase with their prompts as token ids."""

    examples: list[Example]
    tokens: list[list[int]]
    overlong: int = 0
    """How many were too long, and were cut or dropped."""

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class Run:
    """The unchanging facts of a run.

    Args:
        directory: `<run_dir>/<name>`: logs, metrics and the exported model.
        model_directory: HuggingFace directory of the initial weights.
        answers: response token ids of the supervised examples.
        inputs: what identifies the files that the run was given, by the setting that names them.
        identity: of this run, however often it is resumed.
        resumption: the checkpoint that the run goes on after; None for a fresh start.
    """

    directory: Path
    model_directory: Path
    tokenizer: PreTrainedTokenizerBase
    train: Prompts
    evaluation: Prompts
    sft: Prompts
    answers: list[list[int]]
    inputs: dict[str, str]
    identity: str
    resumption: Resumption | None
    lock: TextIO
    """Held as long as the run goes on."""

    def check_directory(self) -> None:
        """Whether the directory is still that of this run.

        Raises:
            EngineError: it was removed, or another has taken its place.
        """
        try:
            if os.path.samestat((self.directory / _LOCK).stat(), os.fstat(self.lock.fileno())):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return  # a file system that does not answer has not lost it
        raise EngineError(
            f"run directory {self.directory} was removed or replaced while the run went on; metrics, logs and the "
            "model have no place"
        )

    @property
    def log_directory(self) -> Path:
        return self.directory / "logs"

    def trace_path(self, step: int, role: str) -> Path:
        """Of the trace of a role's update, where `trainer.profile` asks for one."""
        return self.directory / "profile" / f"step-{step}-{role}.json.gz"


_SETTING = "run_dir/name"
_LOCK = ".lock"
SHARDS = "shards"
"""Where the actor's ranks say where their weights lie."""
WEIGHTS = "weights"
"""Where an export of the actor lies while engines are compared with it."""


def prepare(recipe: Recipe) -> Run:
    """Make the run's directory and model, and encode its examples; or find those of the run that goes on.

    An earlier run of the same name is kept under another: `<name>.1` and so on.

    Raises:
        UserError: this process cannot have what a run needs, a run of this name is going on, model, tokenizer or
            examples do not fit, or the recipe contradicts the checkpoint that it is to go on after.
    """
    check_interpreter()
    check_open_files()
    directory = recipe.directory
    if recipe.model.path is not None and recipe.model.path.is_relative_to(directory):
        raise UserError(f"model.path: {recipe.model.path} is in the directory of this run; choose another name")
    # Held already while the checkpoints are looked at, so that the run that makes them has ended.
    lock = hold(directory, _SETTING) if directory.is_dir() else None
    resumption, notes = find_resumption(recipe)
    for note in notes:
        print(note, flush=True)
    in_place = resumption is not None and resumption.in_place
    if resumption is not None and not in_place and resumption.directory.is_relative_to(directory):
        raise UserError(
            f"resume: {resumption.directory} is another run's, in this one's directory; choose another name"
        )
    lock = claim(directory, in_place=in_place, lock=lock)
    (directory / RECIPE).write_text(settings_yaml(recipe))  # first: by it a run that was killed at once is known
    if not in_place:
        (directory / RUN_IDENTITY).write_text(f"{uuid.uuid4().hex}\n")
    model_directory = recipe.model.path or directory / "initial"
    # A run that goes on compares with the weights that it began with, whatever its seed is now.
    if recipe.model.create is not None and not (in_place and model_directory.is_dir()):
        began = resumption.manifest.recipe if resumption is not None else {}
        create_model(recipe, model_directory, seed=began.get("seed", recipe.seed))
    if resumption is not None:
        keep_warmed_up(recipe, resumption)
    tokenizer = load_tokenizer(model_directory)
    return Run(
        directory,
        model_directory,
        tokenizer,
        *encode(recipe, tokenizer, prompt_limit(recipe)),
        inputs=input_checksums(recipe),
        identity=(directory / RUN_IDENTITY).read_text().strip(),
        resumption=resumption,
        lock=lock,
    )


def claim(directory: Path, *, in_place: bool = False, lock: TextIO | None = None) -> TextIO:
    """Make an empty directory, with an earlier run's moved aside, and hold it until the returned file is closed.

    With `in_place` the run that is there goes on: only what its processes left behind is removed.

    Args:
        directory: of the run.
        in_place: whether what is there goes on.
        lock: of `hold`, if the directory is held already.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(directory, _SETTING)
        if in_place:
            for left_over in (directory / SHARDS, directory / WEIGHTS):
                shutil.rmtree(left_over, ignore_errors=True)
        elif (directory / RECIPE).exists():
            move_aside(directory)
            directory.mkdir()
            lock.close()
            lock = hold(directory, _SETTING)
        elif len(list(directory.iterdir())) > 1:
            raise UserError(f"{_SETTING}: {directory} holds files that are no run's; choose another name")
    except OSError as error:
        raise UserError(f"{_SETTING}: cannot make {directory}: {error.strerror}") from None
    return lock


def move_aside(path: Path) -> Path:
    """Keep what is at `path` under the first free name of `<name>.1`, `<name>.2` and so on; the new path."""
    number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


def hold(directory: Path, setting: str) -> TextIO:
    """Hold a directory against other runs until the returned file is closed or this process ends.

    Raises:
        UserError: another process holds it, or it cannot be written to; names the setting that it comes from.
    """
    try:
        lock = (directory / _LOCK).open("w")
    except OSError as error:
        raise UserError(f"{setting}: cannot write to {directory}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{setting}: a run in {directory} is going on; choose another name or directory") from None
    return lock


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


def encode(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[Prompts, Prompts, Prompts, list[list[int]]]:
    """Training, evaluation and supervised prompts, and the supervised answers, as tokens.

    Raises:
        UserError: naming the prompt that cannot be encoded, or is longer than `limit` tokens and to be refused; or
            dropping those that are too long leaves none.
    """
    splits = load_splits(recipe.data)
    wanted = {
        "training": splits.train,
        "held-out": splits.evaluation[: recipe.trainer.eval_prompts],
        "supervised": splits.sft if recipe.warmup is not None else [],
    }
    policy = recipe.data.overlong_prompts
    phases = {
        name: Prompts(*fit_prompts(tokenizer, examples, max_tokens=limit, policy=policy))
        for name, examples in wanted.items()
    }
    for name, phase in phases.items():
        if wanted[name] and not len(phase):
            raise UserError(
                f"data.overlong_prompts=drop leaves no {name} prompt: all {len(wanted[name]):,} have more than "
                f"{limit} tokens"
            )
    train, evaluation, sft = phases.values()
    answers = encode_answers(tokenizer, sft.examples, max_tokens=recipe.rollout.sampling.max_new_tokens)
    return train, evaluation, sft, answers


def overlong_notes(recipe: Recipe, phases: Mapping[str, Prompts], limit: int) -> list[str]:
    """A line for each phase of which prompts were cut or dropped.

    Args:
        recipe: with the policy.
        phases: by the name of their prompts.
        limit: tokens of the longest prompt that stays as it is.
    """
    policy = recipe.data.overlong_prompts
    done = {"drop": "dropped", "cut_left": "cut, at their beginning", "cut_right": "cut, at their end"}
    return [
        f"data: {phase.overlong:,} of {len(phase) + phase.overlong * (policy == 'drop'):,} {name} prompts have more "
        f"than {limit} tokens and are {done[policy]} (data.overlong_prompts={policy})"
        for name, phase in phases.items()
        if phase.overlong
    ]
