"""Settings of a stream of rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine3d.settings import Settings


class StreamConfig(Settings):
    """How rollouts come one by one, beside training."""

    on_new_weights: Literal["wait", "continue", "recompute", "resend"] = "recompute"
    """What becomes of responses under way when weights change: "wait" lets the transfer wait until they have ended;
    with the others a response goes on with the new weights, and its tokens are of several versions. "continue" keeps
    its KV cache, "recompute" computes it anew, and "resend" aborts it and sends it again with what it has."""
    queue: Literal["oldest_first", "freshest_first"] = "oldest_first"
    """Which of the whole groups a step learns from first, by the version of their oldest token."""
    late: Literal["wait", "evict"] = "wait"
    """Whether a step waits for groups that no later step may learn from, as they would be too old; or does without
    them, and their prompts are drawn again."""
    dynamic_batching: bool = False
    """Let the requests in flight at each engine follow the room in its KV cache, up to
    `rollout.engine.max_running_requests`. They are as many as that, whatever the room, if false."""
    cache_target: float = Field(0.85, gt=0, le=1)
    """With `dynamic_batching`: share of a KV cache that is to be in use. With more of it tokens come faster, and more
    requests are taken back to be computed again."""
    engine_restarts: int = Field(0, ge=0, le=10_000)
    """How many engines that die, or come no further, are started again in a run, while the others go on with what they
    had; the next one ends the run."""
    left_over: Literal["drop", "carry"] = "drop"
    """What becomes of the groups that a step did not take of those that `rollout.over_sampling` began: they are aborted
    and their prompts drawn again, or they go on, for a later step."""
