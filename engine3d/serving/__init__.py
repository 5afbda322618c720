"""SGLang as a server of OpenAI's endpoints, with a model that does not learn."""

from __future__ import annotations

from engine3d.serving.config import ServerConfig
from engine3d.serving.server import CompletionServer

__all__ = ["CompletionServer", "ServerConfig"]
