"""A HuggingFace `config.json`, read with errors that name the key, the value and what would be accepted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.input_files import read_json_object
from engine3d.models.files.other_files import check_no_adapter, no_config, no_directory
from engine3d.settings import LARGEST, SMALLEST

_MOST = {
    "num_hidden_layers": 4096,
    "num_experts": 16_384,
    "num_local_experts": 16_384,
    "n_routed_experts": 16_384,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 65_536,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 24,
}
"""Far beyond any model, and little enough to be counted through."""
_MOST_OF_OTHERS = 1 << 30
_DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")
_OF_OTHER_MODELS: dict[str, Any] = {
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar")),
    **dict.fromkeys(("attention_multiplier", "logit_scale", "no_rope_layers", "clip_qkv")),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1),
    **{"rope_is_neox_style": True, "bias": False, "alibi": False, "parallel_attn": False},
}
"""Keys by which similar models compute otherwise, and the values without an effect. In supported models transformers
passes over them, and SGLang obeys some.
"""


@dataclass(frozen=True)
class HFConfig:
    """The values of a `config.json` and where they come from.

    Args:
        values: the parsed JSON object.
        source: how errors name it.
        outer: the complete `config.json`, if the values are those of its `text_config`.
    """

    values: dict[str, Any]
    source: str
    outer: dict[str, Any] | None = None

    @property
    def complete(self) -> dict[str, Any]:
        """The complete `config.json`."""
        return self.values if self.outer is None else self.outer

    @classmethod
    def load(cls, directory: Path) -> HFConfig:
        """Read `directory/config.json`.

        Raises:
            UserError: no directory, no config.json, one that is not a JSON object, or an adapter next to it.
        """
        if not directory.is_dir():
            raise no_directory(directory)
        path = directory / "config.json"
        if not os.path.lexists(path):
            raise no_config(directory)
        check_no_adapter(directory)
        return cls(read_json_object(path), str(path))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any kind; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, null: int | None = None) -> int:
        """A whole number of at least 1, and at most what a model may have of it.

        Args:
            key: of the value.
            default: where the key is absent.
            null: where its value is null, which transformers refuses of most keys.
        """
        value = self.values.get(key, default)
        value = null if value is None and key in self.values else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a whole number of at least 1")
        if value > (most := _MOST.get(key, _MOST_OF_OTHERS)):
            raise self.error(key, f"at most {most:,}")
        return value

    def number(
        self, key: str, default: float | None = None, *, null: float | None = None, most: float = LARGEST
    ) -> float:
        """A number above zero that float32 holds, and at most `most`. `default` and `null` as of `integer`."""
        value = self.values.get(key, default)
        value = null if value is None and key in self.values else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(key, "a number above 0")
        if not SMALLEST <= value <= most:
            raise self.error(key, f"a number from {SMALLEST:g} to {most:g}")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty where it is absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(key, "a list of texts")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; `default` where the key is absent. Null is refused, as by transformers."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def require(self, key: str, accepted: tuple[Any, ...], default: Any = None) -> None:
        """Refuse every value but the accepted ones."""
        if self.get(key, default) not in accepted:
            raise self.error(key, " or ".join(json.dumps(value) for value in accepted))

    def check_others(self) -> None:
        """Refuse other kinds of values of keys that are read by transformers and SGLang alone, when engines start."""
        for key in ("bos_token_id", "pad_token_id"):
            if type(self.get(key, 0)) is not int:
                raise self.error(key, "the number of a token, or null")
        ends = self.get("eos_token_id", [])
        if not all(type(token) is int for token in (ends if isinstance(ends, list) else [ends])):
            raise self.error("eos_token_id", "the number of a token, a list of them, or null")
        if self.values.get("hidden_act", "silu") is None:
            raise self.error("hidden_act", "a text")
        for key in ("dtype", "torch_dtype"):
            name = self.get(key, "float32")
            if name not in _DTYPES and not str(name).startswith("float8_"):
                raise self.error(key, "bfloat16, float16, float32 or another of torch's floating-point types, or null")
        if not isinstance(self.get("text_config", {}), dict):
            raise self.error("text_config", "an object")
        for key, plain in _OF_OTHER_MODELS.items():
            self.require(key, (plain,), plain)

    def of_text(self, model_type: str) -> HFConfig:
        """The config of the language model of one that has others next to it.

        Args:
            model_type: of the language model.

        Raises:
            UserError: there is no `text_config`, it is of another model, or the two differ in tied embeddings.
        """
        values = self.get("text_config")
        if not isinstance(values, dict):
            raise self.error("text_config", f'an object with model_type "{model_type}"')
        text = HFConfig(values, f"{self.source}: text_config", self.values)
        text.require("model_type", (model_type,))  # by which SGLang chooses the layers
        text.check_others()
        tied = "tie_word_embeddings"
        if self.flag(tied) != text.flag(tied):  # of which SGLang reads one, and transformers the other
            raise self.error(tied, f"{json.dumps(text.flag(tied))}, as text_config has it")
        return text

    def error(self, key: str, expected: str) -> UserError:
        value = json.dumps(self.values[key], default=repr) if key in self.values else "nothing"
        return UserError(f"{self.source}: {key}: expected {expected}, found {shortened(value)}")
