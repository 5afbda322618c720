"""SGLang as a rollout worker."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine3d.rollout.config import RolloutConfig, SamplingConfig
    from engine3d.rollout.engine import RolloutEngine
    from engine3d.rollout.host.messages import Generation
    from engine3d.rollout.member import EngineMember
    from engine3d.rollout.part import EnginePart

__all__ = ["EngineMember", "EnginePart", "Generation", "RolloutConfig", "RolloutEngine", "SamplingConfig"]

# Imported when first asked for: settings need no engine.
_LATER = {
    "EngineMember": "member",
    "EnginePart": "part",
    "Generation": "host.messages",
    "RolloutConfig": "config",
    "RolloutEngine": "engine",
    "SamplingConfig": "config",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"engine3d.rollout.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
