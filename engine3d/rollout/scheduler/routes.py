"""Routes of requests in SGLang's schedulers, which `route_capturer` captures in forward passes.

A row is of the forward pass that drew the token after it. SGLang would give rows of the latest pass instead, where it
has computed a KV cache again: for lack of memory, or with other weights. Rows are kept when a cache is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine3d.startup.lazy_imports import torch

ROUTES_VARIABLE = "ENGINE3D_ROLLOUT_ROUTES"
"""Environment variable of an engine that returns the routes of tokens."""
ROUTES = "routed_experts"
"""Key of a response's routes in its `meta_info`."""
_KEPT = "engine3d_routes"
"""Attribute of a request: the routes of tokens whose KV cache was dropped."""


def register() -> None:
    """Hook SGLang's capture of routes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capturer = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer"
    HookRegistry.register(f"{capturer}.create", _capturer, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.schedule_batch.release_req", _keep, HookType.BEFORE)
    processor = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    HookRegistry.register(f"{processor}._maybe_collect_routed_experts", _collect, HookType.AROUND)


def routes_so_far(request: Any, pool: Any) -> torch.Tensor | None:
    """Routes of a request's tokens but the last.

    Args:
        request: SGLang's, with a token of its response.
        pool: SGLang's table of the slots of requests' tokens.

    Returns:
        (rows, columns), from the request's first row on; None where they are not asked for, or not on this rank.
    """
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer = get_global_experts_capturer()
    if capturer is None or not request.return_routed_experts:
        return None
    kept: torch.Tensor | None = getattr(request, _KEPT, None)
    tokens = len(request.origin_input_ids) + len(request.output_ids_through_stop)
    first = request.routed_experts_start_len + (0 if kept is None else len(kept))
    if kept is not None and first >= tokens - 1:
        return kept
    new: torch.Tensor | None = capturer.get_topk(request.req_pool_idx, tokens, pool, first)
    return new if new is None or kept is None else torch.cat([kept, new])


def _capturer(**arguments: Any) -> Any:
    """`RoutedExpertsCapturer.create`."""
    from engine3d.rollout.scheduler.route_capturer import RouteCapturer

    return RouteCapturer(**arguments)


def _keep(*, req: Any, req_to_token_pool: Any, **_: Any) -> None:
    """Before SGLang's `release_req`: keep the routes of a request whose KV cache is dropped, to be computed again.

    A request without a token has drawn none from them.
    """
    if len(req.output_ids) and not req.finished():
        setattr(req, _KEPT, routes_so_far(req, req_to_token_pool))


def _collect(original: Callable[..., None], processor: Any, req: Any) -> None:
    """SGLang's `_maybe_collect_routed_experts`, with the rows that were kept."""
    req.routed_experts = routes_so_far(req, processor.req_to_token_pool)
