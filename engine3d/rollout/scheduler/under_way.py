"""What a scheduler is at: responses that have begun, and the part of its KV cache that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine3d.rollout.scheduler.versions import VERSIONS


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens that a response has so far, with the log-prob and the version of the weights of each."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


def drawn(scheduler: Any) -> dict[str, Drawn]:
    """Of all requests of SGLang's scheduler that have a token, by their names.

    Of a token whose forward pass is under way nothing is known yet: it is not among them.
    """
    batches = [scheduler.running_batch, scheduler.last_batch]
    requests = [request for batch in batches if batch is not None for request in batch.reqs] + scheduler.waiting_queue
    found = {}
    for request in requests:
        count = len(request.output_ids)
        if count and not request.finished():
            versions = (request.customized_info or {}).get(VERSIONS, [])
            logprobs = request.logprob.output_token_logprobs_val
            found[request.rid] = Drawn(list(request.output_ids), [float(each) for each in logprobs], list(versions))
    return found


def drop_unused(scheduler: Any) -> None:
    """Let SGLang's prefix cache forget all that no request holds."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size()))
