"""Differences between a recipe and the one that made a checkpoint, and those that make it another run."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.checkpoint.manifest import checksum
from engine3d.errors import UserError
from engine3d.models import ModelSpec, load_model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.files.weights import TOKENIZER_FILES, exported_config
from engine3d.models.precision import NOTHING_LEFT_OUT
from hybridflow.algorithms.own_files import file_of, is_own
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.checkpoint.own_code import without_code
from hybridflow.config.initial_model import initial_spec, initial_tokenizer
from hybridflow.config.reading.yaml_loader import public_settings
from hybridflow.config.recipe import Recipe
from hybridflow.data.config import ArithmeticConfig, DataConfig, JsonlConfig
from hybridflow.data.files.config import ChatConfig, FilesConfig, FileSource
from hybridflow.data.files.formats.opening import DataFile, default_cache, files_of

# Of a config.json: what says nothing of the model.
_COSMETIC = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path"})
_ABSENT = "nothing"

_FILES_OF_JSONL = ("data.jsonl.train_path", "data.jsonl.eval_path", "data.jsonl.sft_path")
_FILES_OF_PAIRS = ("data.pairs.train_path", "data.pairs.eval_path", "data.pairs.sft_path")
_TEMPLATES = ("data.files.chat.template", "data.pairs.chat.template")
_FILES_OF_DATA = (*_TEMPLATES, *_FILES_OF_JSONL, *_FILES_OF_PAIRS, "data.files.cache")
_FILE_OF_ALGORITHM = "algorithm.file"
_SINCE_INPUTS = (*_FILES_OF_PAIRS, "data.pairs.chat.template")
_SOURCES = ("data.files.train", "data.files.sft")
_MADE_BY = ("seed", "model.create.seed", "model.create.dtype")

_ADAPTERS = "train.lora"
"""Settings by which a checkpoint holds adapters, but for how engines get these."""
_ADAPTERS_OF_ENGINES = "train.lora.engine"

_MTP = "train.mtp"
"""Setting by which a checkpoint holds the layer for multi-token prediction."""

_SINCE: dict[str, Any] = {
    "data.overlong_prompts": "refuse",
    "train.lora": None,
    _MTP: None,
    _ADAPTERS_OF_ENGINES: "merged",
    **{f"train.fp8.{name}": value for name, value in NOTHING_LEFT_OUT.model_dump().items()},
    "data.files": None,
    "data.pairs": None,
    **{f"data.pairs.chat.{name}": value for name, value in ChatConfig().model_dump(mode="json").items()},
    "trainer.epochs_of_data": None,
    "evaluation": {},
    "metrics.samples_per_step": 0,
    "metrics.sample_characters": 1000,
    "teacher": None,
    "placement.teacher": None,
    "judge": None,
    "placement.judge": None,
    "environment": None,
}
"""Values of these settings in a checkpoint's recipe that is older than they are."""

_RENAMED = {
    "train.one_step_experts": "train.fused_experts",
    "train.expert_copies": "train.copy_engine_dispatcher",
    "train.expert_rows_ahead": "train.predicted_expert_capacity",
    "chat.learn": "chat.train_on",
    "rollout.lend": "rollout.lease",
    "rollout.lend_after_s": "rollout.lease_after_s",
}
"""Settings of older checkpoints' recipes by their ends, with today's."""

_OF_NO_RESULT = (
    "checkpoint.", "limits.", "network.", "samples.", "trainer.async_evaluation",
    "model.create.config.", "model.create.tokenizer",
)  # fmt: skip
"""Settings that a resumed run may change without a word, or that are compared otherwise."""

_OF_THE_START = ("resume", "overwrite", "private")

_ACCEPTED = frozenset(
    {_FILE_OF_ALGORITHM, "seed", "tokenizer", "data", "roles", "roles.critic", "roles.cost_critic"}
    | {"model", "model.config", "model.weights", "model.create", "model.create.seed", "model.create.dtype"}
    | {f"data.{name}" for name in DataConfig.model_fields}
    | {f"data.arithmetic.{name}" for name in ArithmeticConfig.model_fields}
    | {f"data.jsonl.{name}" for name in JsonlConfig.model_fields}
)


@dataclass(frozen=True)
class Difference:
    """A setting, or a fact that settings stand for, with its two values as text."""

    name: str
    saved: str
    given: str

    def __str__(self) -> str:
        return f"{self.name}: {self.saved} in the checkpoint, {self.given} in the recipe"


def check_accepted(accept: Sequence[str], algorithm: AlgorithmSettings) -> None:
    """Check every name in `checkpoint.accept` against what a recipe can contradict.

    Raises:
        UserError: it is the name of nothing.
    """
    for name in accept:
        if name not in _ACCEPTED and not name.startswith("model.config."):
            raise UserError(
                f"checkpoint.accept: {name!r} is nothing that a recipe could contradict; expected seed, tokenizer, "
                "algorithm.file, model, model.config.KEY, roles, roles.ROLE, data or one of the settings in it"
            )
        if not algorithm.needs_engines and name.partition(".")[0] in ("data", "tokenizer"):
            raise UserError(
                f"checkpoint.accept: {name!r} with algorithm.name={algorithm.name}, whose checkpoints hold what "
                "the reference policy says of the previous data; expected the same data"
            )


def is_accepted(accept: Iterable[str], name: str) -> bool:
    """True if `checkpoint.accept` names a setting, or a group that it is in."""
    return any(name == accepted or name.startswith(f"{accepted}.") for accepted in accept)


def contradictions(
    recipe: Recipe, model: Path, roles: Iterable[str], saved: Mapping[str, Any], inputs: Mapping[str, str]
) -> list[Difference]:
    """Find differences that make the recipe another run than the checkpoint's: another model, tokenizer or seed, fewer
    trained roles, or other data.

    Args:
        recipe: of the run that is to be resumed.
        model: directory of the checkpoint with the model's config.json and tokenizer.
        roles: that the checkpoint holds.
        saved: the checkpoint's recipe; empty where it comes from no run, and then model, tokenizer and roles count
            alone.
        inputs: `input_checksums` of the checkpoint's run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _, tokenizer = initial_tokenizer(recipe.model, Path(scratch))
        differences = [
            *_compare(_config(load_model_spec(model)), _config(initial_spec(recipe.model)), "model.config."),
            *_tokenizer_difference(model, tokenizer),
        ]
    trained = recipe.trained_roles
    differences += [Difference(f"roles.{role}", "trained", "not trained") for role in roles if role not in trained]
    if not saved:
        return differences
    before, now = (_identity(settings) for settings in (saved, public_settings(recipe)))
    given, inputs = input_checksums(recipe.algorithm.name, recipe.model.path, recipe.data), without_code(inputs)
    # Older checkpoints say nothing of pairs in data sets and patterns, and of their template.
    current = {name: checksum_ for name, checksum_ in given.items() if name in inputs or name not in _SINCE_INPUTS}
    if _FILE_OF_ALGORITHM not in inputs or _FILE_OF_ALGORITHM not in current:  # another algorithm, which is a change
        inputs, current = (
            {name: entry for name, entry in of.items() if name != _FILE_OF_ALGORITHM} for of in (inputs, current)
        )
    return [*differences, *_compare(before, now), *_compare(inputs, current)]


def changes(given: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Difference]:
    """Find every other setting in which the public settings of a recipe differ from the checkpoint's."""
    if not saved:
        return []
    identity = {*_identity(saved), *_identity(given), *_FILES_OF_DATA}

    def others(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in (_SINCE | _flat(settings)).items()
            if name not in identity and not name.startswith(_OF_NO_RESULT) and name not in _OF_THE_START
        }

    return _compare(others(saved), others(given))


def input_checksums(algorithm: str, model: Path | None, data: DataConfig) -> dict[str, str]:
    """Checksums of the run's own files, wherever they lie: the weights that it starts from, and its prompts.

    Args:
        algorithm: its name.
        model: directory of the initial weights; None of a model that the recipe makes.
        data: where the prompts come from.

    Returns:
        `TensorFiles.fingerprint` of a model that was not made by the recipe, as model.weights; and the checksum of
        every file of prompts, by the setting that names it; and of the user's file that has the algorithm.
    """
    checksums_by_setting = {}
    if is_own(algorithm):
        checksums_by_setting[_FILE_OF_ALGORITHM] = checksum(file_of(algorithm))
    if model is not None:
        with TensorFiles(model) as files:
            checksums_by_setting["model.weights"] = files.fingerprint()
    if data.files is not None:
        checksums_by_setting |= _files_checksums(data.files)
    for names, given in ((_FILES_OF_JSONL, data.jsonl), (_FILES_OF_PAIRS, data.pairs)):
        paths = (given.train_path, given.eval_path, given.sft_path) if given is not None else ()
        checksums = {name: _checksum(path) for name, path in zip(names, paths, strict=False) if path is not None}
        checksums_by_setting |= {name: digest for name, digest in checksums.items() if digest is not None}
    chats = (config.chat if config is not None else None for config in (data.files, data.pairs))
    for name, chat in zip(_TEMPLATES, chats, strict=True):
        if chat is not None and chat.template is not None and chat.template.is_file():
            checksums_by_setting[name] = checksum(chat.template)
    return checksums_by_setting


def _checksum(path: Path) -> str | None:
    """Checksum of a file, or of all files of a data set or a pattern; None if there is none, which nothing has read."""
    if path.is_file():
        return checksum(path)
    try:
        return _of_all(files_of(FileSource(path=(str(path),)), default_cache()))
    except UserError:
        return None


def _of_all(files: Iterable[DataFile]) -> str:
    digest = hashlib.sha256(",".join(file.identity for file in files).encode()).hexdigest()
    return f"sha256:{digest[:32]}"


def _files_checksums(files: FilesConfig) -> dict[str, str]:
    """Checksum of the files of each source together, by the source's name."""
    cache, checksums = files.cache or default_cache(), {}
    for what, sources in (("train", files.train), ("sft", files.sft)):
        for source in sources:
            checksums[f"data.files.{what}.{source.label}"] = _of_all(files_of(source, cache))
    return checksums


def _identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint."""
    flat = _SINCE | _flat(settings)
    trained = any(name.startswith(f"{_MTP}.") for name in flat)
    return {_MTP: "trained" if trained else None} | {
        name: _without_paths(value) if name in _SOURCES else value
        for name, value in flat.items()
        if name in _MADE_BY
        or (name.startswith(_ADAPTERS) and name != _ADAPTERS_OF_ENGINES)
        or (name.startswith("data.") and name not in _FILES_OF_DATA)
    }


def _without_paths(sources: Any) -> Any:
    """Sources without where their files lie: what they hold is compared by its checksums."""
    if not isinstance(sources, list | tuple):
        return sources
    return [{name: value for name, value in source.items() if name != "path"} for source in sources]


def _config(spec: ModelSpec) -> dict[str, Any]:
    config = exported_config(spec, "float32")
    return {name: value for name, value in config.items() if name not in _COSMETIC}


def _tokenizer_difference(saved: Path, given: Path) -> list[Difference]:
    before, now = (
        {name: checksum(directory / name) for name in _tokenizer_files(directory)} for directory in (saved, given)
    )
    names = [name for name in (*before, *now) if before.get(name) != now.get(name)]
    if not before or not names:
        return []
    name = names[0]
    return [Difference("tokenizer", *(f"{name} {_text(checksums.get(name, _ABSENT))}" for checksums in (before, now)))]


def _tokenizer_files(directory: Path) -> list[str]:
    names = (name for name in TOKENIZER_FILES if name != "generation_config.json")
    return [name for name in names if (directory / name).is_file()]


def _compare(saved: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[Difference]:
    return [
        Difference(
            f"{prefix}{name}", *(_text(settings[name]) if name in settings else _ABSENT for settings in (saved, given))
        )
        for name in dict.fromkeys((*saved, *given))
        if (name in saved) != (name in given) or saved[name] != given[name]
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[_current(f"{prefix}{name}")] = value
    return flat


def _current(name: str) -> str:
    """Today's name of a setting."""
    ends = (old for old in _RENAMED if f".{name}".endswith(f".{old}"))
    return next((name.removesuffix(old) + _RENAMED[old] for old in ends), name)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
