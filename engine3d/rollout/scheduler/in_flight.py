"""Responses in flight in a scheduler, and the prefix cache that they need."""

from __future__ import annotations

from typing import Any

from engine3d.rollout.requests import Response
from engine3d.rollout.scheduler.versions import VERSIONS


def responses_in_flight(scheduler: Any) -> dict[str, Response]:
    """The responses of SGLang's scheduler that have a token, by the names of their requests.

    A token whose forward pass still runs is not among them.
    """
    batches = [scheduler.running_batch, scheduler.last_batch]
    requests = [request for batch in batches if batch is not None for request in batch.reqs] + scheduler.waiting_queue
    responses = {}
    for request in requests:
        count = len(request.output_ids)
        if count and not request.finished():
            versions = (request.customized_info or {}).get(VERSIONS, [])
            logprobs = request.logprob.output_token_logprobs_val
            responses[request.rid] = Response(
                list(request.output_ids), [float(logprob) for logprob in logprobs], list(versions)
            )
    return responses


def drop_unused(scheduler: Any) -> None:
    """Let SGLang's prefix cache forget all that no request holds."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size()))
