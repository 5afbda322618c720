"""SGLang as a rollout worker."""

from __future__ import annotations

from engine3d.rollout.config import RolloutConfig, SamplingConfig
from engine3d.rollout.engine import RolloutEngine
from engine3d.rollout.host.messages import Generation

__all__ = ["Generation", "RolloutConfig", "RolloutEngine", "SamplingConfig"]
