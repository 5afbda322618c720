"""Which requests share pages of a KV cache, and attention over these and over their own pages added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAGES = 1024
"""Of a program that writes tables or compares them."""
_HEADS = 16
"""Of a program that adds up."""


@dataclass(frozen=True)
class SharedPages:
    """What the requests of a batch share, and what each has alone, as attention over pages takes them.

    A group is of requests that begin with the same pages. B requests, G groups or more, W pages of a request.
    """

    most: int
    """Requests of a group, 3 or more; what more of them share is several groups'."""
    page_size: int
    """Tokens of a page."""
    order: Tensor
    """(B,) int32: the requests, group by group, and after them those that share nothing."""
    place: Tensor
    """(B,) int32: of each request in that order."""
    shared: Tensor
    """(B,) int32: first tokens of a request that are its group's; 0 without a group."""
    own_lengths: Tensor
    """(B,) int32: the tokens after these."""
    own_pages: Tensor
    """(B, W) int32: their pages."""
    starts: Tensor
    """(G + 1,) int32: of the groups, in that order."""
    lengths: Tensor
    """(G,) int32: tokens that a group shares."""
    pages: Tensor
    """(G, W) int32: their pages."""
    scratch: Tensor
    """(6, B) int32."""

    @staticmethod
    def make(requests: int, width: int, *, most: int, page_size: int, device: torch.device | str) -> SharedPages:
        """For so many requests at most, each of so many pages."""
        groups = _groups(requests)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        each = zeros(4, requests)
        return SharedPages(
            most=most,
            page_size=page_size,
            order=each[0],
            place=each[1],
            shared=each[2],
            own_lengths=each[3],
            own_pages=zeros(requests, width),
            starts=zeros(groups + 1),
            lengths=zeros(groups),
            pages=zeros(groups, width),
            scratch=zeros(6, requests),
        )

    def of(self, requests: int) -> SharedPages:
        """The same memory, for fewer requests."""
        groups = _groups(requests)
        return SharedPages(
            most=self.most,
            page_size=self.page_size,
            order=self.order[:requests],
            place=self.place[:requests],
            shared=self.shared[:requests],
            own_lengths=self.own_lengths[:requests],
            own_pages=self.own_pages[:requests],
            starts=self.starts[: groups + 1],
            lengths=self.lengths[:groups],
            pages=self.pages[:groups],
            scratch=self.scratch[:, :requests],
        )

    def find(self, table: Tensor, lengths: Tensor) -> None:
        """Fill all of it. No request shares its last token.

        A request is in a group with those with which it shares most, if these share as much with each other.

        Args:
            table: (B, W or more) int32, the pages of the requests; the last dimension is contiguous.
            lengths: (B,) int32, their tokens.
        """
        requests, groups, width = len(self.order), len(self.lengths), self.own_pages.shape[1]
        block = triton.next_power_of_2(requests)
        deepest, leaders, follows, agreed, sizes, sources = self.scratch
        halvings = (width + 1).bit_length()
        _nearest[(requests,)](
            table, lengths, deepest, leaders, requests, table.stride(0), self.page_size, halvings, BLOCK=block
        )
        _follow[(requests,)](table, deepest, leaders, follows, agreed, table.stride(0), BLOCK=_PAGES)
        _measure[(requests,)](follows, agreed, sizes, self.shared, requests, self.page_size, BLOCK=block)
        _arrange[(max(requests, groups + 1),)](
            lengths,
            follows,
            sizes,
            self.shared,
            self.order,
            self.place,
            self.own_lengths,
            self.starts,
            self.lengths,
            sources,
            requests,
            groups,
            self.most,
            BLOCK=block,
        )
        _write[(requests + groups, triton.cdiv(width, _PAGES))](
            table,
            self.shared,
            self.own_lengths,
            self.lengths,
            sources,
            self.own_pages,
            self.pages,
            requests,
            table.stride(0),
            width,
            self.page_size,
            BLOCK=_PAGES,
        )

    def merge(self, own: Tensor, own_sums: Tensor, once: Tensor, once_sums: Tensor) -> None:
        """Attention over what is shared and over what is a request's own -> over both, into the latter.

        Each is divided by its sum of exponentials, of which a and b are the logarithms: (e^a A + e^b B) / (e^a + e^b).

        Args:
            own: (B, heads, D), contiguous.
            own_sums: (heads, B) float32, the logarithms.
            once: (B, heads, D), contiguous, in the groups' order. That of a request without a group is not read.
            once_sums: (heads, B) float32.
        """
        requests, heads, width = own.shape
        _merge[(requests, triton.cdiv(heads, _HEADS))](
            own,
            own_sums,
            once,
            once_sums,
            self.place,
            self.shared,
            own_sums.stride(0),
            once_sums.stride(0),
            heads,
            width,
            HEADS=_HEADS,
            WIDTH=triton.next_power_of_2(width),
        )


def _groups(requests: int) -> int:
    """Most of them: any two requests or more make one, and four or more are cut into no more than half as many."""
    return max(1, requests // 2)


@triton.jit(do_not_specialize=["requests", "stride", "page_size", "halvings"])
def _nearest(  # type: ignore[no-untyped-def]
    table, lengths, deepest, leaders, requests, stride, page_size, halvings, BLOCK: tl.constexpr
):
    """Pages that each request shares with any other, and the first of those with which it shares so many."""
    own = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = (other < requests) & (other != own)
    high = tl.minimum(tl.load(lengths + own), tl.load(lengths + other, mask=there, other=1)) - 1
    high = tl.where(there, high // page_size, 0)
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    mine, theirs = table + own.to(tl.int64) * stride - 1, table + other.to(tl.int64) * stride - 1
    # Where a page is the same, so are those before it: halve what is left.
    for _ in range(0, halvings):
        middle = (low + high + 1) // 2
        asked = middle > low
        same = tl.load(mine + middle, mask=asked, other=0) == tl.load(theirs + middle, mask=asked, other=0)
        low = tl.where(asked & same, middle, low)
        high = tl.where(asked & (same == 0), middle - 1, high)
    most = tl.max(low, axis=0)
    first = tl.min(tl.where(low == most, other, BLOCK), axis=0)
    tl.store(deepest + own, most)
    tl.store(leaders + own, tl.where(most > 0, tl.minimum(first, own), own))


@triton.jit(do_not_specialize=["stride"])
def _follow(table, deepest, leaders, follows, agreed, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first request of each one's group, and how many first pages are that one's."""
    own = tl.program_id(0)
    pages = tl.load(deepest + own)
    leader = tl.load(leaders + own)
    leader = tl.where(tl.load(deepest + leader) == pages, leader, own)
    found = pages
    for start in range(0, pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        mine = tl.load(table + own.to(tl.int64) * stride + page, mask=page < pages, other=0)
        first = tl.load(table + leader.to(tl.int64) * stride + page, mask=page < pages, other=0)
        found = tl.minimum(found, tl.min(tl.where(mine != first, page, pages), axis=0))
    tl.store(follows + own, leader)
    tl.store(agreed + own, found)


@triton.jit(do_not_specialize=["requests", "page_size"])
def _measure(follows, agreed, sizes, shared, requests, page_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Requests of each one's group, and the tokens that all of them share."""
    own = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = other < requests
    same = there & (tl.load(follows + other, mask=there, other=-1) == tl.load(follows + own))
    size = tl.sum(same.to(tl.int32), axis=0)
    mine = tl.load(agreed + own)
    pages = tl.min(tl.where(same, tl.load(agreed + other, mask=there, other=0), mine), axis=0)
    tl.store(sizes + own, size)
    tl.store(shared + own, tl.where(size > 1, pages * page_size, 0))


@triton.jit(do_not_specialize=["requests", "groups", "most"])
def _arrange(  # type: ignore[no-untyped-def]
    lengths,
    follows,
    sizes,
    shared,
    order,
    place,
    own_lengths,
    starts,
    group_lengths,
    sources,
    requests,
    groups,
    most,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = other < requests
    leader = tl.load(follows + other, mask=there, other=-1)
    grouped = there & (tl.load(shared + other, mask=there, other=0) > 0)
    parts = (tl.load(sizes + other, mask=there, other=0) + most - 1) // most
    parts = tl.where(grouped & (leader == other), parts, 0)
    count, used = tl.sum(grouped.to(tl.int32), axis=0), tl.sum(parts, axis=0)
    if (own >= used) & (own <= groups):
        tl.store(starts + own, count)
        tl.store(group_lengths + own, 0, mask=own < groups)
    if own < requests:
        first, tokens = tl.load(follows + own), tl.load(shared + own)
        within = tl.sum((grouped & (leader == first) & (other < own)).to(tl.int32), axis=0)
        before = tl.sum((grouped & (leader < first)).to(tl.int32), axis=0) + within
        after = count + tl.sum((there & (grouped == 0) & (other < own)).to(tl.int32), axis=0)
        position = tl.where(tokens > 0, before, after)
        tl.store(order + position, own)
        tl.store(place + own, position)
        tl.store(own_lengths + own, tl.load(lengths + own) - tokens)
        if (tokens > 0) & (within % most == 0):
            group = tl.sum(tl.where(other < first, parts, 0), axis=0) + within // most
            tl.store(starts + group, position)
            tl.store(group_lengths + group, tokens)
            tl.store(sources + group, first)


@triton.jit(do_not_specialize=["requests", "stride", "width", "page_size"])
def _write(  # type: ignore[no-untyped-def]
    table,
    shared,
    own_lengths,
    group_lengths,
    sources,
    own_pages,
    group_pages,
    requests,
    stride,
    width,
    page_size,
    BLOCK: tl.constexpr,
):
    """The pages of each request after those of its group, and of each group."""
    row = tl.program_id(0)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < requests:
        first = tl.load(shared + row) // page_size
        inside = page * page_size < tl.load(own_lengths + row)
        found = tl.load(table + row.to(tl.int64) * stride + first + page, mask=inside, other=0)
        tl.store(own_pages + row.to(tl.int64) * width + page, found, mask=inside)
    else:
        group = row - requests
        inside = page * page_size < tl.load(group_lengths + group)
        source = tl.load(sources + group).to(tl.int64)
        found = tl.load(table + source * stride + page, mask=inside, other=0)
        tl.store(group_pages + group.to(tl.int64) * width + page, found, mask=inside)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    own,
    own_sums,
    once,
    once_sums,
    place,
    shared,
    own_stride,
    once_stride,
    heads,
    width,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    if tl.load(shared + request) > 0:
        there = tl.load(place + request)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        a = tl.load(own_sums + head * own_stride + request, mask=head < heads, other=0.0)
        b = tl.load(once_sums + head * once_stride + there, mask=head < heads, other=0.0)
        most = tl.maximum(a, b)
        a, b = tl.exp(a - most), tl.exp(b - most)
        column = tl.arange(0, WIDTH)
        inside = (head < heads)[:, None] & (column < width)[None, :]
        here = own + (request * heads + head).to(tl.int64)[:, None] * width + column[None, :]
        source = once + (there * heads + head).to(tl.int64)[:, None] * width + column[None, :]
        second = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        total = ((a / (a + b))[:, None] * second) + ((b / (a + b))[:, None] * first)
        tl.store(here, total.to(own.dtype.element_ty), mask=inside)
