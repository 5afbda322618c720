"""SGLang as a server of OpenAI's endpoints, with a model that does not learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import attributes_later

if TYPE_CHECKING:
    from engine3d.serving.config import ServerConfig
    from engine3d.serving.server import CompletionServer

__all__ = ["CompletionServer", "ServerConfig"]

# Imported when first asked for: settings need no server.
__getattr__ = attributes_later(__name__, {"CompletionServer": "server", "ServerConfig": "config"})
