"""SGLang's attention in plain PyTorch, with one call for all sequences of a length in place of one for each sequence.

The numbers are those of SGLang's own loop: the result of one sequence does not depend on the others of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine3d.platform.sink_attention import attend_with_sinks, seen_keys

Attend = Callable[[Tensor, Tensor, Tensor, float | None, bool, bool], Tensor]
"""A function with the arguments of `_attend`."""

# Keys and values are gathered from the cache for this many tokens at a time.
_GATHERED_TOKENS = 1 << 17


def install() -> None:
    """Give SGLang's native PyTorch backend the functions of this module."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    Backend._run_sdpa_forward_decode = _by_length(decode, Backend._run_sdpa_forward_decode)
    Backend._run_sdpa_forward_extend = _by_length(extend, Backend._run_sdpa_forward_extend)
    Backend.forward_decode = _with_sinks(Backend.forward_decode)
    Backend.forward_extend = _with_sinks(Backend.forward_extend)
    _attend_to_latents()


def _with_sinks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward pass of the backend that knows attention sinks: they are the backend's `sinks` during the call."""

    def run(self: Any, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        self.sinks = sinks
        return forward(self, *args, **kwargs)

    return run


def _attend_to_latents() -> None:
    """Make latent attention work on the cached latents in every forward pass, as it does when it decodes.

    SGLang's default makes keys and values of a prompt, which its native PyTorch backend would not look at: that reads
    everything from the cache.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _by_length(grouped: Callable[..., Tensor], loop: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`grouped` where it will do, SGLang's own loop for an encoder, or for sliding windows without sinks."""

    def run(self: Any, *tensors: Any, is_cross_attn: bool, sliding_window_size: int | None, **options: Any) -> Tensor:
        *of_every_call, encoder_lens = tensors
        sinks: Tensor | None = self.sinks
        if is_cross_attn or encoder_lens is not None or (sliding_window_size is not None and sinks is None):
            options |= {"is_cross_attn": is_cross_attn, "sliding_window_size": sliding_window_size}
            return loop(self, *tensors, **options)
        if sinks is not None:
            # SGLang's size leaves out a token's own position.
            options["attend"] = partial(
                _attend_with_sinks, sinks, None if sliding_window_size is None else sliding_window_size + 1
            )
        return grouped(*of_every_call, **options)

    return run


def decode(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    attend: Attend | None = None,
) -> Tensor:
    """One new token a sequence.

    Args:
        query, output: [sequences, heads, head_dim]; the output is filled in place. Values, and with them the output,
            may have another head_dim than queries and keys.
        k_cache, v_cache: [slots, groups, head_dim].
        req_to_token: [requests, context] slot of each token of each request.
        req_pool_indices: [sequences] row of each sequence in it.
        seq_lens: [sequences] tokens, the new one included.
        attend: in place of plain attention.
    """
    for (length,), rows in _groups(seq_lens):
        slots = req_to_token[req_pool_indices[rows], :length]
        attended = (attend or _attend)(
            query[rows].unsqueeze(2), k_cache[slots], v_cache[slots], scaling, enable_gqa, causal
        )
        output[rows] = attended.squeeze(2)
    return output


def extend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    *,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    attend: Attend | None = None,
) -> Tensor:
    """Several new tokens a sequence, after a prefix that is in the cache.

    Args:
        query, output: [new tokens, heads, head_dim], sequence by sequence; the output is filled in place.
        extend_prefix_lens, extend_seq_lens: [sequences] cached and new tokens; the others as for `decode`.
    """
    starts = extend_seq_lens.cumsum(0) - extend_seq_lens
    for (length, prefix), rows in _groups(seq_lens, extend_prefix_lens):
        positions = starts[rows].unsqueeze(1) + torch.arange(length - prefix)
        # The causal mask counts from the first key, so the prefix has queries too, whose results are dropped.
        padded = query.new_zeros(len(rows), query.shape[1], length, query.shape[2])
        padded[:, :, prefix:] = query[positions].transpose(1, 2)
        slots = req_to_token[req_pool_indices[rows], :length]
        attended = (attend or _attend)(padded, k_cache[slots], v_cache[slots], scaling, enable_gqa, causal)
        output[positions] = attended[:, :, prefix:].transpose(1, 2)
    return output


def _groups(*lengths: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Sequences with the same lengths, in groups whose tokens are not too many."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(*(column.tolist() for column in lengths), strict=True)):
        groups[key].append(row)
    for key, rows in groups.items():
        step = max(1, _GATHERED_TOKENS // max(1, key[0]))
        for first in range(0, len(rows), step):
            yield key, torch.tensor(rows[first : first + step])


def _attend_with_sinks(
    sinks: Tensor,
    window: int | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    _enable_gqa: bool,
    _causal: bool,
) -> Tensor:
    """Attend from the last of the keys' positions, with sinks and within a window, as `_attend` does."""
    keys, values = (tensor.transpose(1, 2).to(query.dtype) for tensor in (keys, values))
    length = keys.shape[-2]
    seen = seen_keys(torch.arange(length - query.shape[-2], length), length, window)
    return attend_with_sinks(query, keys, values, sinks, seen, scaling)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, enable_gqa: bool, causal: bool
) -> Tensor:
    """[n, heads, q, head_dim] against [n, k, groups, head_dim] -> as the query."""
    keys, values = (tensor.transpose(1, 2).to(query.dtype) for tensor in (keys, values))
    return scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=enable_gqa, is_causal=causal)
