"""Files of a trainer's arguments (model, prompts, reward function), which every process of a run can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import cloudpickle

from engine3d.durable import naming
from engine3d.errors import UserError
from engine3d.models.files.weights import TOKENIZER_FILES
from hybridflow.api.recipe_builder import Given
from hybridflow.rundir.status.lock import hold, move_aside

_TOKENIZER_FILES = frozenset(TOKENIZER_FILES) - {"generation_config.json"}

RewardFunction = Callable[..., Any]
Prompt = str | Mapping[str, Any]
"""A prompt, or {"prompt": text, "answer": ..., ...}: the answer and all other fields are anything that JSON has."""


class InputFiles:
    """The directory `<run_dir>/<name>.inputs`, made when something is first written there.

    An earlier run's is kept as `<name>.inputs.1` and so on.
    """

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory.with_name(f"{run_directory.name}.inputs")
        self._lock: TextIO | None = None

    @cached_property
    def directory(self) -> Path:
        """The directory, empty at first.

        Raises:
            UserError: it cannot be made, or belongs to a run that is going on.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self._path, "run_dir/name")
            if len(list(self._path.iterdir())) > 1:
                move_aside(self._path)
                self._path.mkdir()
                self._lock.close()
                self._lock = hold(self._path, "run_dir/name")
        except OSError as error:
            raise UserError(f"run_dir/name: cannot make {self._path}: {error.strerror}") from None
        return self._path

    def close(self) -> None:
        """Leave the directory to others."""
        if self._lock is not None:
            self._lock.close()


@dataclass(frozen=True)
class Sources:
    """Arguments of a trainer. Construction checks all that can be checked without starting or writing anything.

    Args:
        model: HuggingFace directory, or a loaded `transformers` model; the recipe's if None.
        tokenizer: its directory, or a loaded one; that in the model's directory if None.
        reward_fn: (generated_texts) -> floats; or "arithmetic", "module:function", "file.py:function".
        reward_model: HuggingFace directory, or a loaded `transformers` model, with a scalar head.

    Raises:
        UserError: one of them is nothing of the kind.
    """

    model: Any = None
    tokenizer: Any = None
    reward_fn: RewardFunction | str | None = None
    reward_model: Any = None

    def __post_init__(self) -> None:
        _check_model("model", self.model)
        _check_model("reward_model", self.reward_model)
        if self.reward_fn is not None and not isinstance(self.reward_fn, str) and not callable(self.reward_fn):
            kind = type(self.reward_fn).__name__
            raise UserError(f"reward_fn: a {kind}, expected a function of the generated texts, or 'module:function'")
        if self.tokenizer is None:
            if _is_loaded(self.model):
                raise UserError("tokenizer: none, expected one beside a loaded model")
        elif self.model is None:
            raise UserError("tokenizer: one without a model, expected model= beside it")
        elif isinstance(self.tokenizer, str | Path):
            _check_directory("tokenizer", Path(self.tokenizer), "tokenizer_config.json")
        elif not hasattr(self.tokenizer, "save_pretrained"):
            kind = type(self.tokenizer).__name__
            raise UserError(f"tokenizer: a {kind}, expected a HuggingFace directory or a loaded tokenizer")

    def write(
        self,
        files: InputFiles,
        prompts: Sequence[Prompt] | None,
        eval_prompts: Sequence[Prompt] | None = None,
        passes: int | None = None,
    ) -> Given:
        """Write what is no file yet.

        Raises:
            UserError: a prompt is none, or the reward function cannot be pickled.
        """
        if eval_prompts is not None and prompts is None:
            raise UserError("eval_prompts: some without prompts, expected both")
        lines = _lines("prompts", prompts) if prompts is not None else None
        held_out = _lines("eval_prompts", eval_prompts) if eval_prompts is not None else None
        name, path = self._reward(files)
        return Given(
            model=self._model(files),
            reward_model=_written_model(self.reward_model, files, "reward_model"),
            reward_name=name,
            reward=path,
            prompts=_written_lines(lines, files, "prompts.jsonl"),
            eval_prompts=_written_lines(held_out, files, "eval_prompts.jsonl"),
            number=len(prompts) if prompts is not None else 0,
            passes=passes,
        )

    def _model(self, files: InputFiles) -> Path | None:
        model = _written_model(self.model, files, "model")
        if model is None or self.tokenizer is None:
            return model
        if not _is_loaded(self.model):
            model = _linked(model, files.directory / "model")
        tokenizer = self.tokenizer
        if isinstance(tokenizer, str | Path):
            from hybridflow.data.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(Path(tokenizer))
        tokenizer.save_pretrained(model)
        return model

    def _reward(self, files: InputFiles) -> tuple[str, str | None]:
        """Name and path of the reward function."""
        function = self.reward_fn
        if function is None or isinstance(function, str):
            return (function or "reward").rpartition(":")[2], function
        name = getattr(function, "__name__", type(function).__name__)
        name = name if name.isidentifier() else "reward"
        path = importable_path(function)
        return name, path or f"{pickled(function, files.directory / f'{name}.pkl')}:"


def importable_path(function: RewardFunction) -> str | None:
    """ "module:function" of a function that other processes can import under that name; None of any other callable."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is function else None


def pickled(function: RewardFunction, path: Path) -> Path:
    """Write a callable with all that it needs of this program; the path.

    Raises:
        UserError: it holds what cannot be pickled.
    """
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects raise that it holds
        reason = " ".join(str(error).split())
        raise UserError(f"reward_fn: {path.stem} cannot be sent to other processes: {reason}") from None
    with naming(path):
        path.write_bytes(data)
    return path


def _is_loaded(model: Any) -> bool:
    return model is not None and not isinstance(model, str | Path)


def _check_model(name: str, model: Any) -> None:
    if _is_loaded(model):
        if not hasattr(model, "save_pretrained"):
            kind = type(model).__name__
            raise UserError(f"{name}: a {kind}, expected a HuggingFace directory or a loaded transformers model")
    elif model is not None:
        _check_directory(name, Path(model), "config.json")


def _check_directory(name: str, directory: Path, file: str) -> None:
    if not (directory / file).is_file():
        raise UserError(f"{name}: no {file} in {directory}, expected a HuggingFace directory (nothing is downloaded)")


def _written_model(model: Any, files: InputFiles, name: str) -> Path | None:
    """The directory of a model; a loaded one is saved."""
    if model is None:
        return None
    if not _is_loaded(model):
        return Path(model).absolute()
    model.save_pretrained(files.directory / name)
    return files.directory / name


def _linked(directory: Path, linked: Path) -> Path:
    """A directory with links to the files of another, but for its tokenizer; the new one."""
    linked.mkdir()
    for path in directory.iterdir():
        if path.name not in _TOKENIZER_FILES and path.is_file():
            (linked / path.name).symlink_to(path.resolve())
    return linked


def _lines(name: str, prompts: Sequence[Prompt]) -> list[str]:
    """The JSON line of each prompt."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        raise UserError(f"{name}: a {type(prompts).__name__}, expected a list of texts, or of prompts with answers")
    if not prompts:
        raise UserError(f"{name}: none, expected at least one")
    return [_line(f"{name}[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _line(name: str, prompt: Prompt) -> str:
    fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
    if not isinstance(fields, Mapping) or "prompt" not in fields or not all(isinstance(key, str) for key in fields):
        raise UserError(f'{name}: {str(prompt)[:60]!r}, expected a text, or {{"prompt": text, "answer": ..., ...}}')
    if not isinstance(fields["prompt"], str) or not fields["prompt"]:
        raise UserError(f"{name}: {str(prompt)[:60]!r}, expected a text that is not empty")
    try:
        return json.dumps({"prompt": fields["prompt"], "answer": "", **fields}, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        reason = f"which JSON cannot hold ({error})"
        raise UserError(f"{name}: {str(prompt)[:60]!r}, {reason}; expected texts, numbers, lists and so on") from None


def _written_lines(lines: Sequence[str] | None, files: InputFiles, name: str) -> Path | None:
    if lines is None:
        return None
    path = files.directory / name
    with naming(path):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
