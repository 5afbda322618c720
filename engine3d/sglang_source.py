"""The installed SGLang's source, for what is read of it without its ten seconds of imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def sglang_directory() -> Path:
    """Directory of the installed SGLang, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed in this environment")
    return Path(spec.submodule_search_locations[0])


def attention_arguments(groups: int) -> dict[str, Any]:
    """SGLang's arguments for `groups` groups of an engine's ranks, each with its own attention and output layer."""
    return {"enable_dp_attention": True, "enable_dp_lm_head": True, "dp_size": groups} if groups > 1 else {}


def complete_configs() -> None:
    """Give SGLang's configs of Qwen3.5 the key that its class needs, and that files saved by transformers lack.

    It is one of `text_config`, of which `json_model_override_args` can only replace all.
    """
    from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig

    Qwen3_5TextConfig.full_attention_interval = 4
