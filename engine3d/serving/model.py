"""Properties of a HuggingFace directory that a server needs before SGLang reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.input_files import read_model_config
from engine3d.models.quantisation.stored import unquantised_overrides
from engine3d.serving.config import ServerConfig

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_TEMPLATE = "chat_template"
_NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal models have the sizes of their language model."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's directory, of any architecture that SGLang serves.

    Args:
        context_length: most tokens of question and answer; None where neither settings nor model say it.
        overrides: keys of its config.json that SGLang is to read otherwise than the file has them.
    """

    directory: Path
    architectures: tuple[str, ...]
    context_length: int | None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, config: ServerConfig) -> ServedModel:
        """Read a directory.

        Raises:
            UserError: it has no configuration, weights, tokenizer or chat template, or a shorter context than is set.
        """
        if not (directory / "config.json").is_file():
            raise UserError(f"{directory} has no config.json, expected a HuggingFace directory")
        settings = read_model_config(directory)
        architectures = settings.get("architectures")
        if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
            raise UserError(f"{directory / 'config.json'} names no architectures")
        if not any(directory.glob("*.safetensors")):
            raise UserError(f"{directory} holds no *.safetensors")
        if not any((directory / name).is_file() for name in _TOKENIZERS):
            raise UserError(f"{directory} holds no tokenizer, expected one of {', '.join(_TOKENIZERS)}")
        if _TEMPLATE not in config.server_args and not _has_template(directory):
            raise UserError(
                f"{directory} has no chat template, expected one in its tokenizer_config.json, or "
                f"server_args.{_TEMPLATE}"
            )
        positions = _positions(settings)
        length = config.context_length
        if length is not None and positions is not None and length > positions:
            raise UserError(f"context_length is {length}; {directory} has {positions} positions")
        return cls(directory, tuple(architectures), length or positions, unquantised_overrides(directory, settings))


def _has_template(directory: Path) -> bool:
    if any(directory.glob(f"{_TEMPLATE}*")):
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and f'"{_TEMPLATE}"' in path.read_text(errors="replace")


def _positions(settings: dict[str, Any]) -> int | None:
    for level in (settings, *(settings.get(name) for name in _NESTED)):
        if isinstance(level, dict) and isinstance(positions := level.get("max_position_embeddings"), int):
            return positions
    return None
