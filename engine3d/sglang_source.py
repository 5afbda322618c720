"""The installed SGLang's source, for what is read of it without its ten seconds of imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def sglang_directory() -> Path:
    """Where the installed SGLang lies, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed in this environment")
    return Path(spec.submodule_search_locations[0])
