"""SGLang's platform class for a CPU without AMX kernels: SGLang's native PyTorch code paths, on any x86 or ARM core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from torch.overrides import TorchFunctionMode

from engine3d.platform.cpu import gloo_groups
from engine3d.platform.cpu.sglang import SINK_BACKEND
from engine3d.platform.cpu.sglang_modules import attention as sglang_cpu_attention
from engine3d.platform.cpu.sglang_modules import delta_net as sglang_cpu_delta_net
from engine3d.platform.cpu.sglang_modules import fp8 as sglang_cpu_fp8
from engine3d.platform.cpu.sglang_modules import lora as sglang_cpu_lora
from engine3d.platform.cpu.sglang_modules.sampling import murmur_hash32


class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform whose parts are all SGLang's own."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.server_args import (
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            add_deterministic_attention_backend_choices,
        )

        # PyTorch's attention treats each sequence alone here, so that no result depends on the rest of the batch.
        if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            add_deterministic_attention_backend_choices(["torch_native", SINK_BACKEND])

    def init_backend(self) -> None:
        from sglang.kernels.ops.layernorm import elementwise
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import dp_attention, sampler
        from sglang.srt.layers.attention import torch_native_backend
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.rotary_embedding import factory
        from sglang.srt.lora import lora_manager
        from sglang.srt.model_executor import forward_batch_info, model_runner

        # SGLang's weight checker waits for the device by this name, whatever the device is.
        torch.cuda.synchronize = _nothing
        # Its batch invariant kernels are Triton's. What deterministic inference is left with on a CPU: a seed for each
        # sample, and PyTorch's operators, which give the same bits for the same batch.
        batch_invariant_ops.enable_batch_invariant_mode = _nothing
        sampler.murmur_hash32 = murmur_hash32
        # Of data parallel attention, what is there for GPUs alone.
        dp_attention.memcpy_triton = _copy_rows
        forward_batch_info.ForwardBatch.prepare_mlp_sync_batch = _without_pinned_memory(
            forward_batch_info.ForwardBatch.prepare_mlp_sync_batch
        )
        for name in ("init_state", "prepare_lora_batch"):
            method = getattr(lora_manager.LoRAManager, name)
            setattr(lora_manager.LoRAManager, name, _without_pinned_memory(method))
        torch_native_backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda _: 1
        # Its AMX kernels need weights padded to multiples of 32 on every rank; PyTorch's do not.
        model_runner.adjust_config_with_unaligned_cpu_tp = _as_it_is
        sglang_cpu_attention.install()
        factory.get_rope_cpu = _rope(factory.get_rope_cpu, factory.get_rope)
        fused_moe_native.moe_forward_native = _with_local_experts(fused_moe_native.moe_forward_native)
        sglang_cpu_fp8.install()
        sglang_cpu_lora.install()
        elementwise.fused_gate_sigmoid_mul_add = _add_gated
        elementwise.fused_sigmoid_mul = _gated
        _replace_norms_over_heads()
        sglang_cpu_delta_net.install()

    def get_torch_distributed_backend_str(self) -> str:
        gloo_groups.register()
        return gloo_groups.BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        return _latent_pool()

    def get_paged_allocator_cls(self) -> type:
        return _token_allocator()

    def get_dispatch_key_name(self) -> str:
        return "native"

    def empty_cache(self) -> None:
        """There is no cache. SGLang's own collects garbage instead: half a second at every flush of the KV cache."""

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, on a CPU."""


def _add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, total: torch.Tensor) -> None:
    """Add a shared expert's output times its gate to that of the routed experts, as SGLang's Triton kernel does.

    Args:
        hidden: the layer's input, (tokens, hidden) like all others but the gate.
        gate: (hidden,).
        shared: output of the shared expert.
        total: that of the routed experts, which is changed.
    """
    scale = torch.sigmoid(hidden.float() @ gate.float())
    total.copy_(total.float() + scale[:, None] * shared.float())


def _gated(output: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Multiply the output of attention by a sigmoid, as SGLang's Triton kernel does.

    Args:
        output: (tokens, elements of all heads).
        gate: of the same shape, or (tokens, heads, elements of a head).
        inplace: True to change `output`.
    """
    gated = (output.float() * torch.sigmoid(gate.reshape(output.shape).float())).to(output.dtype)
    return output.copy_(gated) if inplace else gated


def _replace_norms_over_heads() -> None:
    """Give MiniMax-M2's norms over all heads functions in PyTorch in place of Triton's."""
    from sglang.srt.models import minimax_m2

    minimax_m2.rms_sumsq_serial = _sums_of_squares
    minimax_m2.rms_apply_serial = _normed


def _sums_of_squares(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Sums of the squares of the rows of two tensors, end to end. (rows, _) each -> (2 * rows,) float32."""
    return torch.cat([rows.float().square().sum(-1) for rows in (first, second)])


def _normed(
    first: torch.Tensor,
    second: torch.Tensor,
    first_weight: torch.Tensor,
    second_weight: torch.Tensor,
    squares: torch.Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over the root of their mean squares, times a weight.

    Args:
        first: (rows, elements of this rank), like `second` with elements of its own.
        second: of as many rows.
        first_weight: (elements of this rank,), like `second_weight`.
        second_weight: of `second`.
        squares: sums of squares of all ranks, as of `_sums_of_squares`.
        ranks: that share each row.
        eps: added to mean squares.
    """
    made = [
        (rows.float() * torch.rsqrt(total[:, None] / (rows.shape[-1] * ranks) + eps) * weight.float()).to(rows.dtype)
        for rows, weight, total in zip((first, second), (first_weight, second_weight), squares.view(2, -1), strict=True)
    ]
    return made[0], made[1]


def _copy_rows(
    target: torch.Tensor,
    source: torch.Tensor,
    _dimension: int,
    offset: torch.Tensor,
    rows: torch.Tensor,
    from_there: bool,
) -> None:
    """Copy `rows` rows, from `offset` on in the source or in the target, as SGLang's kernel of that name."""
    first, count = int(offset), int(rows)
    if from_there:
        target[:count] = source[first : first + count]
    else:
        target[first : first + count] = source[:count]


def _without_pinned_memory[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function of SGLang's that asks torch for pinned memory, which there is none of without a GPU."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Unpinned():
            return function(*args, **kwargs)

    return run


class _Unpinned(TorchFunctionMode):
    """Memory that is asked to be pinned is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def _as_it_is(model_config: Any, load_config: Any, tp_size: int) -> Any:
    return model_config


def _rope(scaled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's rotary embeddings of latent attention on a CPU, which refuse models whose positions are not scaled."""

    def rope(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool,
        rope_scaling: dict[str, Any] | None,
        *others: Any,
    ) -> Any:
        if rope_scaling is None:
            return plain(head_size, rotary_dim, max_position, base, is_neox_style)
        return scaled(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *others)

    return rope


def _with_local_experts(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """SGLang's native experts, for expert parallel ranks too: an expert of another rank has the id -1 there."""

    def forward_local(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        local = topk_output.topk_ids >= 0
        if local.all():
            return forward(layer, x, topk_output, config)
        # Each pair of a token and a local expert as a token of its own, with one expert.
        tokens = local.nonzero()[:, 0]
        pairs = topk_output._replace(
            topk_ids=topk_output.topk_ids[local].unsqueeze(1), topk_weights=topk_output.topk_weights[local].unsqueeze(1)
        )
        output = torch.zeros_like(x)
        if len(tokens):
            output.index_add_(0, tokens, forward(layer, x[tokens], pairs, config))
        return output

    return forward_local


def _latent_pool() -> type:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    class LatentPool(MLATokenToKVPool):
        """SGLang's cache of latent keys and values, which of a platform's class it expects one more argument."""

        def __init__(self, *args: Any, index_head_dim: int | None, **kwargs: Any) -> None:
            if index_head_dim is not None:
                raise ValueError("sparse attention over latent keys has no CPU implementation in SGLang")
            super().__init__(*args, **kwargs)

    return LatentPool


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
