"""SGLang as a rollout worker."""

from __future__ import annotations

from engine3d.rollout.config import RolloutConfig, SamplingConfig
from engine3d.rollout.engine import RolloutEngine
from engine3d.rollout.host.messages import Generation
from engine3d.rollout.member import EngineMember
from engine3d.rollout.part import EnginePart

__all__ = ["EngineMember", "EnginePart", "Generation", "RolloutConfig", "RolloutEngine", "SamplingConfig"]
