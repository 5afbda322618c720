"""SGLang's platform class for a CPU without AMX kernels: SGLang's native PyTorch code paths, on any x86 or ARM core."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from engine3d.platform.sglang_cpu_sampling import murmur_hash32


class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform whose parts are all SGLang's own."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.server_args import (
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            add_deterministic_attention_backend_choices,
        )

        # PyTorch's attention runs sequence by sequence here, so that no result depends on the rest of the batch.
        if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            add_deterministic_attention_backend_choices(["torch_native"])

    def init_backend(self) -> None:
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler

        # SGLang's weight checker waits for the device by this name, whatever the device is.
        torch.cuda.synchronize = _nothing
        # Its batch invariant kernels are Triton's. What deterministic inference is left with on a CPU: a seed for each
        # sample, and PyTorch's operators, which give the same bits for the same batch.
        batch_invariant_ops.enable_batch_invariant_mode = _nothing
        sampler.murmur_hash32 = murmur_hash32

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        return _token_allocator()

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What has nothing to do on a CPU."""


def _token_allocator() -> type:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    class TokenAllocator(TokenToKVPoolAllocator):
        """SGLang's allocator for pages of one token, which unlike its paged one needs no Triton kernels."""

        def __init__(
            self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
        ) -> None:
            if page_size != 1:
                raise ValueError(f"page_size is {page_size}: SGLang on a CPU allocates pages of 1 token")
            super().__init__(size, dtype, device, kvcache, need_sort)

    return TokenAllocator
