"""Attention of a decoding step that reads what several requests share once for them.

The samples of a prompt have its pages of the KV cache in common. SGLang reads these for each of them, at every step and
in every layer. Here the queries of some samples, as many as a tile has rows for, go through the shared pages together,
and each through its own pages alone; the two are added up by their sums of exponentials, as in cascade attention of
FlashInfer and in SGLang's for drafts of several tokens. Both are in one call of the kernel that SGLang calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine3d.platform.cuda.kernels.cascade import SharedPages

_TILE_ROWS = 64
"""Queries in a tile of FlashAttention-3 for few queries."""


def table_bytes(requests: int, tokens: int) -> int:
    """Memory of an engine's rank for it: pages of the requests with the tokens of one, and of half as many groups."""
    return 6 * requests * tokens


def requests_of_a_group(heads: int, kv_heads: int) -> int:
    """Requests that go through their shared pages together: one tile has the queries of a key's heads."""
    return max(4, _TILE_ROWS // (heads // kv_heads))


def attend(
    flash: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor, shared: SharedPages, **settings: Any
) -> Tensor:
    """Attention of a token of each request.

    Args:
        flash: SGLang's `flash_attn_with_kvcache`.
        query: (B, heads, D).
        keys: (pages, page size, KV heads, D), and values alike.
        shared: of these requests.
        settings: further arguments of `flash`.

    Returns:
        (B, heads, D)
    """
    outputs, sums, *_ = flash(
        q=query.index_select(0, shared.rows),
        k_cache=keys,
        v_cache=values,
        page_table=shared.pages,
        cache_seqlens=shared.lengths,
        cu_seqlens_q=shared.starts,
        max_seqlen_q=shared.most,
        causal=False,
        return_softmax_lse=True,
        **settings,
    )
    return shared.merge(outputs, sums)


def share(table: Tensor, lengths: Tensor, page_size: int, most: int) -> SharedPages:
    """Find the pages that requests share, for attention that is not captured.

    Args:
        table: (B, W) int32, their pages.
        lengths: (B,) int32, their tokens.
        page_size: tokens of a page.
        most: requests of a group.
    """
    # Triton is slow to import, and only engines need it here.
    from engine3d.platform.cuda.kernels.cascade import SharedPages

    device: torch.device = table.device
    shared = SharedPages.make(*table.shape, most=most, page_size=page_size, device=device)
    shared.find(table, lengths)
    return shared
