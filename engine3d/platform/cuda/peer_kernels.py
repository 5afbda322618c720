"""Kernels that read the memory of other GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 1024
"""Of 8 bytes, or elements, that a program reads of a rank at a time."""


def collect(addresses: torch.Tensor, mine: int, into: torch.Tensor) -> None:
    """Into (R, ...), contiguous and of whole 16 bytes a rank, what is at each of the (R,) int64 addresses."""
    words = into.nbytes // (8 * len(into))
    if words:
        grid = (triton.cdiv(words, _WORDS), len(into))
        _collect[grid](addresses, into.view(-1).view(torch.int64), words, mine, len(into), WORDS=_WORDS)


def collect_sum(addresses: torch.Tensor, mine: int, into: torch.Tensor) -> None:
    """Into a contiguous tensor the sum of what as many such tensors as there are addresses, at each, have at `mine`."""
    if count := into.numel():
        grid = (triton.cdiv(count, _WORDS),)
        _collect_sum[grid](addresses, into, count, mine, RANKS=len(addresses), WORDS=_WORDS)


@triton.jit(do_not_specialize=["mine", "ranks"])
def _collect(addresses, into, words, mine, ranks, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    # Each rank begins with another one, so that no GPU is read by all at a time.
    rank = (mine + tl.program_id(1)) % ranks
    source = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
    # A word of 16 bytes is two elements of 8, which the compiler joins into one access.
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    place = rank.to(tl.int64) * words + word
    tl.store(into + place, tl.load(source + word, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["mine"])
def _collect_sum(addresses, into, count, mine, RANKS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = into.dtype.element_ty
    element = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = element < count
    total = tl.zeros((WORDS,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        source = tl.load(addresses + rank).to(tl.pointer_type(kind)) + mine.to(tl.int64) * count
        total += tl.load(tl.multiple_of(source, 16) + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + element, total.to(kind), mask=inside)
