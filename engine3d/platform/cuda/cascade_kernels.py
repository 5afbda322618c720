"""Which requests share pages of a KV cache, and attention over these and over their own pages added up."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """What the requests of a batch share, and what each has alone, as one call of attention over pages takes them.

    A group is of requests that begin with the same pages; it goes through these, and then each request through its own.
    B requests, G groups at most, W pages of a request at most.
    """

    most: int
    """Requests of a group, 3 or more; what more of them share is several groups'."""
    page_size: int
    """Tokens of a page."""
    block: int
    """Requests that a program compares: the same for all that have this memory, so that one kernel is compiled."""
    rows: Tensor
    """(2 * B,) int32, whose query a row is: of the requests of the first group, of the second and so on, and then of
    all requests. What is left after these is of any."""
    starts: Tensor
    """(G + B + 1,) int32: the rows of the groups, and of each request."""
    lengths: Tensor
    """(G + B,) int32: tokens that a group shares, and those that a request has alone."""
    pages: Tensor
    """(G + B, W) int32: their pages."""
    shared: Tensor
    """(B,) int32: first tokens of a request that are its group's; 0 without a group."""
    place: Tensor
    """(B,) int32: its row in a group."""
    scratch: Tensor
    """(6, B) int32."""

    @staticmethod
    def make(requests: int, width: int, *, most: int, page_size: int, device: torch.device | str) -> SharedPages:
        """For so many requests at most, each of so many pages."""
        entries = requests + _groups(requests)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return SharedPages(
            most=most,
            page_size=page_size,
            block=triton.next_power_of_2(requests),
            rows=zeros(2 * requests),
            starts=zeros(entries + 1),
            lengths=zeros(entries),
            pages=zeros(entries, width),
            shared=zeros(requests),
            place=zeros(requests),
            scratch=zeros(6, requests),
        )

    def of(self, requests: int) -> SharedPages:
        """The same memory, for fewer requests."""
        entries = requests + _groups(requests)
        return replace(
            self,
            rows=self.rows[: 2 * requests],
            starts=self.starts[: entries + 1],
            lengths=self.lengths[:entries],
            pages=self.pages[:entries],
            shared=self.shared[:requests],
            place=self.place[:requests],
            scratch=self.scratch[:, :requests],
        )

    def find(self, table: Tensor, lengths: Tensor) -> None:
        """Fill all of it. No request shares its last token.

        A request is in a group with those with which it shares most, if these share as much with each other.

        Args:
            table: (B, W or more) int32, the pages of the requests; the last dimension is contiguous.
            lengths: (B,) int32, their tokens.
        """
        requests, width = len(self.shared), self.pages.shape[1]
        groups, block = len(self.lengths) - requests, self.block
        deepest, leaders, follows, agreed, sizes, sources = self.scratch
        halvings = (width + 1).bit_length()
        _nearest[(requests,)](
            table, lengths, deepest, leaders, requests, table.stride(0), self.page_size, halvings, BLOCK=block
        )
        _follow[(requests,)](table, deepest, leaders, follows, agreed, table.stride(0), BLOCK=_PAGES)
        _measure[(requests,)](follows, agreed, sizes, self.shared, requests, self.page_size, BLOCK=block)
        _arrange[(max(requests, groups),)](
            lengths,
            follows,
            sizes,
            self.shared,
            self.rows,
            self.place,
            self.starts,
            self.lengths,
            sources,
            requests,
            groups,
            self.most,
            BLOCK=block,
        )
        _write[(groups + requests, triton.cdiv(width, _PAGES))](
            table,
            self.shared,
            self.lengths,
            sources,
            self.pages,
            groups,
            table.stride(0),
            width,
            self.page_size,
            BLOCK=_PAGES,
        )

    def merge(self, parts: Tensor, sums: Tensor) -> Tensor:
        """Attention over what is shared and over what is a request's own -> (B, heads, D), over both.

        Each is divided by its sum of exponentials, of which a and b are the logarithms: (e^a A + e^b B) / (e^a + e^b).

        Args:
            parts: (2 * B, heads, D), contiguous: of each row.
            sums: (heads, 2 * B) float32, contiguous: the logarithms.
        """
        (count, heads, width), requests = parts.shape, len(self.shared)
        result = torch.empty_like(parts[:requests])
        _merge[(requests, triton.cdiv(heads, _HEADS))](
            parts,
            sums,
            result,
            self.place,
            self.shared,
            self.starts[len(self.lengths) - requests :],
            count,
            heads,
            width,
            HEADS=_HEADS,
            WIDTH=triton.next_power_of_2(width),
        )
        return result


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
    rows,
    place,
    starts,
    entry_lengths,
    sources,
    requests,
    groups,
    most,
    BLOCK: tl.constexpr,
):
    """Rows and lengths of the groups, then of each request."""
    own = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = other < requests
    leader = tl.load(follows + other, mask=there, other=-1)
    grouped = there & (tl.load(shared + other, mask=there, other=0) > 0)
    parts = (tl.load(sizes + other, mask=there, other=0) + most - 1) // most
    parts = tl.where(grouped & (leader == other), parts, 0)
    count, used = tl.sum(grouped.to(tl.int32), axis=0), tl.sum(parts, axis=0)
    if (own >= used) & (own < groups):
        tl.store(starts + own, count)
        tl.store(entry_lengths + own, 0)
    if own < requests:
        first, tokens = tl.load(follows + own), tl.load(shared + own)
        tl.store(rows + count + own, own)
        tl.store(rows + count + requests + own, 0, mask=count + own < requests)
        tl.store(starts + groups + own, count + own)
        tl.store(starts + groups + requests, count + requests, mask=own == 0)
        tl.store(entry_lengths + groups + own, tl.load(lengths + own) - tokens)
        if tokens > 0:
            within = tl.sum((grouped & (leader == first) & (other < own)).to(tl.int32), axis=0)
            position = tl.sum((grouped & (leader < first)).to(tl.int32), axis=0) + within
            tl.store(rows + position, own)
            tl.store(place + own, position)
            if within % most == 0:
                group = tl.sum(tl.where(other < first, parts, 0), axis=0) + within // most
                tl.store(starts + group, position)
                tl.store(entry_lengths + group, tokens)
                tl.store(sources + group, first)


@triton.jit(do_not_specialize=["groups", "stride", "width", "page_size"])
def _write(  # type: ignore[no-untyped-def]
    table, shared, lengths, sources, pages, groups, stride, width, page_size, BLOCK: tl.constexpr
):
    """The pages of each group, and those of each request that come after its group's."""
    entry = tl.program_id(0)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = page * page_size < tl.load(lengths + entry)
    if entry < groups:
        source, first = tl.load(sources + entry, mask=tl.load(lengths + entry) > 0, other=0), 0
    else:
        source = entry - groups
        first = tl.load(shared + source) // page_size
    found = tl.load(table + source.to(tl.int64) * stride + first + page, mask=inside, other=0)
    tl.store(pages + entry.to(tl.int64) * width + page, found, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _merge(  # type: ignore[no-untyped-def]
    parts, sums, result, place, shared, starts, count, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    request = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (column < width)[None, :]
    cell = head.to(tl.int64)[:, None] * width + column[None, :]
    own = tl.load(starts + request).to(tl.int64)
    total = tl.load(parts + own * heads * width + cell, mask=inside, other=0.0).to(tl.float32)
    if tl.load(shared + request) > 0:
        group = tl.load(place + request).to(tl.int64)
        a = tl.load(sums + head * count + own, mask=head < heads, other=0.0)
        b = tl.load(sums + head * count + group, mask=head < heads, other=0.0)
        most = tl.maximum(a, b)
        a, b = tl.exp(a - most), tl.exp(b - most)
        of_group = tl.load(parts + group * heads * width + cell, mask=inside, other=0.0).to(tl.float32)
        total = (a / (a + b))[:, None] * total + (b / (a + b))[:, None] * of_group
    here = result + request.to(tl.int64) * heads * width + cell
    tl.store(here, total.to(result.dtype.element_ty), mask=inside)
