"""Settings of a rollout engine for the tiny models."""

from __future__ import annotations

from engine3d.rollout import RolloutConfig

TINY_ROLLOUT = RolloutConfig(
    dtype="float32",
    context_length=64,
    max_running_requests=64,
    mem_fraction_static=0.3,
    token_versions=True,
)
WITH_ROUTES = TINY_ROLLOUT.model_copy(update={"routes": True})
"""The same, of a model with experts."""
