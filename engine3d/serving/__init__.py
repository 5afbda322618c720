"""SGLang as a server of OpenAI's endpoints, with a model that does not learn."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine3d.serving.config import ServerConfig
    from engine3d.serving.server import CompletionServer

__all__ = ["CompletionServer", "ServerConfig"]

# Imported when first asked for: settings need no server.
_LATER = {"CompletionServer": "server", "ServerConfig": "config"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"engine3d.serving.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
