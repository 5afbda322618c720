"""Responses in flight in a scheduler, and the prefix cache that they need."""

from __future__ import annotations

from typing import Any

from engine3d.rollout.requests import Response
from engine3d.rollout.scheduler.routes import routes_so_far
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
            routes = routes_so_far(request, scheduler.req_to_token_pool)
            responses[request.rid] = Response(
                list(request.output_ids),
                [float(logprob) for logprob in logprobs],
                list(versions),
                routes=None if routes is None else routes.numpy(),
            )
    return responses


def drop_unused(scheduler: Any) -> None:
    """Evict from SGLang's prefix cache everything that no request uses."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size()))
