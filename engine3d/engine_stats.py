"""Statistics of a rollout engine that serves a stream. Controllers import them, which import nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of an engine that serves a stream.

    Args:
        cache_tokens: capacity of its KV cache.
        used_tokens: cached tokens of requests in flight; shared tokens count once.
        queued: requests that wait for cache.
        retracted: requests that were retracted for others to continue. This and the following count since its start.
        batches: forward passes.
        batch_tokens: sum over batches of the cached tokens of requests after each.
        prompt_tokens: tokens that requests were sent with: of prompts, and of responses so far.
        cached_tokens: those of them that were in the cache.
        resent: responses that were sent again because weights changed.
        continued: responses that paused while weights changed, and continued.
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
