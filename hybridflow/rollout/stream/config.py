"""Settings of a stream of rollouts: `rollout.stream`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine3d.settings import Settings

OnNewWeights = Literal["wait", "continue", "recompute", "resend"]


class StreamConfig(Settings):
    """Stream of rollouts, generated while models are trained."""

    on_new_weights: OnNewWeights = "recompute"
    """Treatment of responses in flight when weights change. "wait": the transfer waits for their end. With the others a
    response continues with the new weights, and its tokens have several versions: "continue" keeps its KV cache,
    "recompute" computes it again, "resend" aborts the request and sends it again with its tokens."""
    queue: Literal["oldest_first", "freshest_first"] = "oldest_first"
    """Order in which a step takes complete groups, by the version of their oldest token."""
    late: Literal["wait", "evict"] = "wait"
    """Treatment of groups that would be too old for any later step. "wait": the step waits for them. "evict": the step
    does without them, and their prompts are drawn again.
    """
    dynamic_batching: bool = False
    """Adapt the requests in flight at each engine to the free capacity of its KV cache, up to
    `rollout.engine.max_running_requests`. Their number is that limit if false.
    """
    cache_target: float = Field(0.85, gt=0, le=1)
    """Share of a KV cache that `dynamic_batching` aims to use. A larger share generates faster, and more requests are
    retracted and computed again.
    """
    engine_restarts: int = Field(0, ge=0, le=10_000)
    """Restarts of engines that die or hang, in a run. The other engines continue meanwhile. One failure more ends the
    run.
    """
    left_over: Literal["drop", "carry"] = "drop"
    """Treatment of groups of `rollout.over_sampling` that a step did not take. "drop": they are aborted and their
    prompts drawn again. "carry": they continue, for a later step.
    """
