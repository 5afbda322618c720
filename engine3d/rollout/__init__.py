"""SGLang as a rollout worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import attributes_later

if TYPE_CHECKING:
    from engine3d.rollout.config import RolloutConfig, SamplingConfig
    from engine3d.rollout.engine import EngineMember, RolloutEngine
    from engine3d.rollout.requests import Request, Response
    from engine3d.rollout.shard import EngineShard

__all__ = ["EngineMember", "EngineShard", "Request", "Response", "RolloutConfig", "RolloutEngine", "SamplingConfig"]

# Imported when first asked for: settings need no engine.
__getattr__ = attributes_later(
    __name__,
    {
        "EngineMember": "engine",
        "EngineShard": "shard",
        "Request": "requests",
        "Response": "requests",
        "RolloutConfig": "config",
        "RolloutEngine": "engine",
        "SamplingConfig": "config",
    },
)
