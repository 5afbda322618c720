"""The routes of forward passes, by slot of the KV cache: SGLang's capturer with less memory.

SGLang's keeps int32 entries of every layer, in pinned memory, on every rank. This one keeps those of layers with
experts, in the dtype of `RouteFormat`, in ordinary memory, on ranks that send responses.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.state_capturer.base import BaseDeviceCache
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

from engine3d.models import load_model_spec
from engine3d.models.experts.routes import RouteFormat


class RouteMemory:
    """Routes on the host. `buffer`: (slots, columns)."""

    def __init__(self, slots: int, format: RouteFormat) -> None:
        self.buffer = format.empty(slots)


class RouteCapturer(RoutedExpertsCapturer):  # type: ignore[misc]
    """SGLang's capturer.

    Args:
        model: SGLang's.
        model_config: SGLang's of it.
        num_tokens: slots of the KV cache.
        max_running_requests: most requests of a batch.
        device: of the rank.
    """

    def __init__(
        self, *, model: torch.nn.Module, model_config: Any, num_tokens: int, max_running_requests: int, device: str
    ) -> None:
        # Not SGLang's, which would allocate its memory.
        arguments = get_server_args()
        fused = 0 if arguments.disable_shared_experts_fusion else getattr(model, "num_fused_shared_experts", 0)
        sizes = load_model_spec(model_config.model_path).sizes
        self._format = format = RouteFormat.of(sizes)
        self._layers = torch.tensor(format.layers, device=device)
        self._responds = get_parallel().attn_tp_rank == 0
        self.num_layers, self.topk_size, self.num_fused_shared_experts = sizes.layers, format.topk, fused
        # Experts get the tokens of all groups of ranks.
        tokens = max(arguments.chunked_prefill_size, max_running_requests) * arguments.dp_size
        self.device_cache = BaseDeviceCache(tokens, sizes.layers, format.topk + fused, device, "routes")
        self.host_cache = RouteMemory(num_tokens if self._responds else 0, format)

    def on_forward_end(self, forward_batch: Any, *arguments: Any, **named: Any) -> Any:
        """Record the routes of a pass, on ranks that send responses."""
        return super().on_forward_end(forward_batch, *arguments, **named) if self._responds else None

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Any:
        """Return routes (rows, columns) of a request's tokens from `start_len` to the last but one; None elsewhere."""
        return super().get_topk(req_pool_idx, seqlen, req_to_token_pool, start_len) if self._responds else None

    def _get_local_slice(self, forward_batch: Any, *arguments: Any) -> torch.Tensor:
        rows = super()._get_local_slice(forward_batch, *arguments)[: len(forward_batch.out_cache_loc)]
        return rows[:, self._layers].flatten(1).to(self._format.dtype)
