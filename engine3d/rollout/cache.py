"""Size of a KV cache in tokens, such that no request waits for it."""

from __future__ import annotations

from collections.abc import Mapping

PAGE_TOKENS: Mapping[str, int] = {"cpu": 1, "cuda": 64}
"""Tokens of a page by kind of device: on GPUs the attention backend decides, and most have pages of 1 or of 64."""

_RESERVED_TOKENS = 8

# SGLang counts a prompt that it computes in parts twice: it then runs one request less than it may
# (managers/scheduler.py, `get_num_allocatable_reqs`), and the last would wait until the first has ended.
SPARE_REQUESTS = 1


STATES_OF_A_REQUEST = 4
"""States of gated delta nets for each request that may run: SGLang needs three of them, one for its prefix, to run as
many requests as it was asked for."""


def reserved_tokens(draft_tokens: int) -> int:
    """Positions of a context that SGLang keeps for itself (managers/tp_worker.py, scheduler.py, tokenizer_manager.py).

    This many more are asked for, so that prompt and response together can really have `context_length` tokens.
    """
    return max(_RESERVED_TOKENS, draft_tokens + 1)


def tokens_beyond(draft_tokens: int) -> int:
    """Tokens that a cache has beyond the longest sequence that SGLang completes in it."""
    return reserved_tokens(draft_tokens) + slots_of_drafts(draft_tokens)


def slots_of_drafts(draft_tokens: int) -> int:
    """Tokens of the cache that SGLang keeps for each request beyond its own, to draft and to verify.

    Twice those of a forward pass (`get_alloc_reserve_per_decode` in mem_cache/allocation_sizing.py).
    """
    return 2 * (draft_tokens + 1) if draft_tokens else 0


def samples_together(prompts: int, samples: int, groups: int) -> int:
    """Samples of a prompt that one group of an engine's ranks draws, which computes the prompt once for them.

    All of them where there is a prompt for each group; one by one they are distributed where there is not.
    """
    return samples if prompts >= groups else 1


def tokens_needed(*, requests: int, sequence_tokens: int, page_tokens: int, draft_tokens: int = 0) -> int:
    """Tokens of a cache in which this many requests run at once.

    SGLang begins a request where its prompt, all that it may generate and a page more are free (`PrefillAdder` in
    managers/schedule_policy.py).

    Args:
        requests: that run at once.
        sequence_tokens: of the longest prompt with the longest response.
        page_tokens: of a page, of which each request has its own.
        draft_tokens: that are drafted ahead.
    """
    pages = -(-(sequence_tokens + slots_of_drafts(draft_tokens)) // page_tokens) + 1
    return (requests + SPARE_REQUESTS) * pages * page_tokens + page_tokens + reserved_tokens(draft_tokens)
