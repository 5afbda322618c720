"""How a rollout engine that serves a stream is. Read by controllers, which import nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """How an engine that serves a stream is.

    Args:
        cache_tokens: that its KV cache has room for.
        used_tokens: of them that requests hold; what they have in common counts once.
        queued: requests that wait for room.
        retracted: requests that gave their room back for others to go on; these and the next are since its start.
        batches: forward passes.
        batch_tokens: sum over these of the tokens that requests held after each.
        prompt_tokens: that requests were sent with: of prompts, and of what responses had already.
        cached_tokens: of them that the cache had.
        resent: responses that were sent again because weights changed.
        continued: responses that stood still while weights changed, and went on.
    """

    cache_tokens: int
    used_tokens: int = 0
    queued: int = 0
    retracted: int = 0
    batches: int = 0
    batch_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resent: int = 0
    continued: int = 0
