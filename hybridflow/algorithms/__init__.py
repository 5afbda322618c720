"""Algorithms: pure functions of tensors, one file a family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import names of the Python API, which guides import from here too."""
        if name[:1].isupper():
            return getattr(importlib.import_module("hybridflow"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
