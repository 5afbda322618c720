"""SGLang's backend of FlashAttention-3, whose decoding steps read what requests share once for several of them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from engine3d.errors import EngineError
from engine3d.platform.cuda.kernels.cascade import SharedPages
from engine3d.rollout.scheduler.attention.cascade_attention import attend, requests_of_a_group, share


def register() -> None:
    """Register this backend for FlashAttention-3 with SGLang's model runners of this process."""
    register_attention_backend("fa3")(CascadeBackend)


class CascadeBackend(FlashAttentionBackend):  # type: ignore[misc]
    """Attention of decoding steps in two parts; of all else as SGLang's."""

    def __init__(self, runner: Any) -> None:
        """Raises EngineError for a model whose attention is another than that of all earlier tokens."""
        super().__init__(runner)
        other = {
            "latent attention": self.use_mla,
            "an encoder": self.is_encoder_decoder,
            "attention to a chunk": self.has_local_attention,
            "attention to a window": self.has_swa or self.use_sliding_window_kv_pool,
            "a cache of other numbers": self.kv_cache_dtype_str != "auto",
            "drafts": self.topk > 0 or runner.is_draft_worker,
        }
        if untried := [name for name, has in other.items() if has]:
            raise EngineError(f"rollout.engine.cascade_attention=true was not tried with {untried[0]}, expected false")
        ranks, model = runner.ps.attn_tp_size, runner.model_config
        self._most = requests_of_a_group(model.get_num_attention_heads(ranks), model.get_num_kv_heads(ranks))
        self._buffers: SharedPages | None = None
        self._shared: SharedPages | None = None
        logging.getLogger(__name__).info("What requests share is read once for up to %d of them.", self._most)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See SGLang's."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._buffers = SharedPages.make(
            max_bs, self.max_num_pages, most=self._most, page_size=self.page_size, device=self.device
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """See SGLang's; captured with the model's step, so that requests are compared again in each."""
        super().init_forward_metadata_in_graph(forward_batch)
        self._shared = None
        if forward_batch.forward_mode.is_decode_or_idle():
            metadata = self.decode_cuda_graph_metadata[forward_batch.batch_size]
            assert self._buffers is not None
            self._shared = self._buffers.of(forward_batch.batch_size)
            self._shared.find(metadata.page_table, metadata.cache_seqlens_int32)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """See SGLang's."""
        super().init_forward_metadata(forward_batch)
        self._shared = None
        if forward_batch.forward_mode.is_decode_or_idle() and forward_batch.batch_size:
            metadata = self.forward_metadata
            self._shared = share(metadata.page_table, metadata.cache_seqlens_int32, self.page_size, self._most)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """See SGLang's."""
        if self._shared is None:
            result: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **others)
            return result
        if any(argument is not None for argument in others.values()):
            raise EngineError("rollout.engine.cascade_attention=true was not tried with this model, expected false")
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.forward_metadata.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        result = attend(
            self.flash_attn_with_kvcache,
            q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim),
            keys.view(-1, self.page_size, layer.tp_k_head_num, layer.head_dim),
            values.view(-1, self.page_size, layer.tp_v_head_num, layer.v_head_dim),
            self._shared,
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap,
            num_splits=self.num_splits,
        )
        return result.view(-1, layer.tp_q_head_num * layer.v_head_dim)
