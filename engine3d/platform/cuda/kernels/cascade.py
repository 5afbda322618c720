"""Shared pages of requests in a KV cache, and the merge of attention over them with that over each request's rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAGES = 1024
"""Pages of a program that writes tables or compares them."""
_HEADS = 16
"""Heads of a program that merges."""


@dataclass(frozen=True)
class SharedPages:
    """Pages that the requests of a batch share, and pages of each alone, in the form of one call of paged attention.

    The requests of a group begin with the same pages. Attention goes through these once a group, and then through the
    pages of each request alone.
    B requests, G groups at most, W pages of a request at most.
    """

    most: int
    """Most requests of a group, 3 or more. More requests that share pages are several groups."""
    page_size: int
    """Tokens of a page."""
    block: int
    """Requests that a program compares: the same for all that have this memory, so that one kernel is compiled."""
    rows: Tensor
    """(2 * B,) int32, the request of each query row: those of the first group, of the second and so on, and then all
    requests. Rows after these are of any request."""
    starts: Tensor
    """(G + B + 1,) int32: the rows of the groups, and of each request."""
    lengths: Tensor
    """(G + B,) int32: tokens that a group shares, and those that a request has alone."""
    pages: Tensor
    """(G + B, W) int32: their pages."""
    shared: Tensor
    """(B,) int32: tokens of a request that its group shares; 0 without a group."""
    group_row: Tensor
    """(B,) int32: its row in a group."""
    scratch: Tensor
    """(6, B) int32."""

    @staticmethod
    def make(requests: int, width: int, *, most: int, page_size: int, device: torch.device | str) -> SharedPages:
        """Allocate memory for at most `requests` requests of `width` pages each."""
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
            group_row=zeros(requests),
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
            group_row=self.group_row[:requests],
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
            self.group_row,
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

    def merge(self, outputs: Tensor, sums: Tensor) -> Tensor:
        """Attention over what is shared and over what is a request's request -> (B, heads, D), over both.

        Each is divided by its sum of exponentials, of which a and b are the logarithms: (e^a A + e^b B) / (e^a + e^b).

        Args:
            outputs: (2 * B, heads, D), contiguous: of each row.
            sums: (heads, 2 * B) float32, contiguous: the logarithms.
        """
        (count, heads, width), requests = outputs.shape, len(self.shared)
        result = torch.empty_like(outputs[:requests])
        _merge[(requests, triton.cdiv(heads, _HEADS))](
            outputs,
            sums,
            result,
            self.group_row,
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
    """Most groups of `requests`: two requests or more make one, four or more at most half as many."""
    return max(1, requests // 2)


@triton.jit(do_not_specialize=["requests", "stride", "page_size", "halvings"])
def _nearest(  # type: ignore[no-untyped-def]
    table, lengths, deepest, leaders, requests, stride, page_size, halvings, BLOCK: tl.constexpr
):
    """Most pages that each request shares with any other, and the first of the requests with which it shares them."""
    request = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = (other < requests) & (other != request)
    high = tl.minimum(tl.load(lengths + request), tl.load(lengths + other, mask=there, other=1)) - 1
    high = tl.where(there, high // page_size, 0)
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    mine, theirs = table + request.to(tl.int64) * stride - 1, table + other.to(tl.int64) * stride - 1
    # Where a page is the same, so are those before it: halve what is left.
    for _ in range(0, halvings):
        middle = (low + high + 1) // 2
        searching = middle > low
        same = tl.load(mine + middle, mask=searching, other=0) == tl.load(theirs + middle, mask=searching, other=0)
        low = tl.where(searching & same, middle, low)
        high = tl.where(searching & (same == 0), middle - 1, high)
    most = tl.max(low, axis=0)
    first = tl.min(tl.where(low == most, other, BLOCK), axis=0)
    tl.store(deepest + request, most)
    tl.store(leaders + request, tl.where(most > 0, tl.minimum(first, request), request))


@triton.jit(do_not_specialize=["stride"])
def _follow(table, deepest, leaders, follows, agreed, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first request of each one's group, and how many first pages are that one's."""
    request = tl.program_id(0)
    pages = tl.load(deepest + request)
    leader = tl.load(leaders + request)
    leader = tl.where(tl.load(deepest + leader) == pages, leader, request)
    agreed_pages = pages
    for start in range(0, pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        mine = tl.load(table + request.to(tl.int64) * stride + page, mask=page < pages, other=0)
        first = tl.load(table + leader.to(tl.int64) * stride + page, mask=page < pages, other=0)
        agreed_pages = tl.minimum(agreed_pages, tl.min(tl.where(mine != first, page, pages), axis=0))
    tl.store(follows + request, leader)
    tl.store(agreed + request, agreed_pages)


@triton.jit(do_not_specialize=["requests", "page_size"])
def _measure(follows, agreed, sizes, shared, requests, page_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Requests of each one's group, and the tokens that all of them share."""
    request = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = other < requests
    same = there & (tl.load(follows + other, mask=there, other=-1) == tl.load(follows + request))
    size = tl.sum(same.to(tl.int32), axis=0)
    mine = tl.load(agreed + request)
    pages = tl.min(tl.where(same, tl.load(agreed + other, mask=there, other=0), mine), axis=0)
    tl.store(sizes + request, size)
    tl.store(shared + request, tl.where(size > 1, pages * page_size, 0))


@triton.jit(do_not_specialize=["requests", "groups", "most"])
def _arrange(  # type: ignore[no-untyped-def]
    lengths,
    follows,
    sizes,
    shared,
    rows,
    group_row,
    starts,
    entry_lengths,
    sources,
    requests,
    groups,
    most,
    BLOCK: tl.constexpr,
):
    """Rows and lengths of the groups, then of each request."""
    request = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    there = other < requests
    leader = tl.load(follows + other, mask=there, other=-1)
    grouped = there & (tl.load(shared + other, mask=there, other=0) > 0)
    splits = (tl.load(sizes + other, mask=there, other=0) + most - 1) // most
    splits = tl.where(grouped & (leader == other), splits, 0)
    count, used = tl.sum(grouped.to(tl.int32), axis=0), tl.sum(splits, axis=0)
    if (request >= used) & (request < groups):
        tl.store(starts + request, count)
        tl.store(entry_lengths + request, 0)
    if request < requests:
        first, tokens = tl.load(follows + request), tl.load(shared + request)
        tl.store(rows + count + request, request)
        tl.store(rows + count + requests + request, 0, mask=count + request < requests)
        tl.store(starts + groups + request, count + request)
        tl.store(starts + groups + requests, count + requests, mask=request == 0)
        tl.store(entry_lengths + groups + request, tl.load(lengths + request) - tokens)
        if tokens > 0:
            within = tl.sum((grouped & (leader == first) & (other < request)).to(tl.int32), axis=0)
            position = tl.sum((grouped & (leader < first)).to(tl.int32), axis=0) + within
            tl.store(rows + position, request)
            tl.store(group_row + request, position)
            if within % most == 0:
                group = tl.sum(tl.where(other < first, splits, 0), axis=0) + within // most
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
    entry_pages = tl.load(table + source.to(tl.int64) * stride + first + page, mask=inside, other=0)
    tl.store(pages + entry.to(tl.int64) * width + page, entry_pages, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _merge(  # type: ignore[no-untyped-def]
    outputs, sums, result, group_row, shared, starts, count, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    request = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (column < width)[None, :]
    cell = head.to(tl.int64)[:, None] * width + column[None, :]
    request_row = tl.load(starts + request).to(tl.int64)
    total = tl.load(outputs + request_row * heads * width + cell, mask=inside, other=0.0).to(tl.float32)
    if tl.load(shared + request) > 0:
        group = tl.load(group_row + request).to(tl.int64)
        a = tl.load(sums + head * count + request_row, mask=head < heads, other=0.0)
        b = tl.load(sums + head * count + group, mask=head < heads, other=0.0)
        most = tl.maximum(a, b)
        a, b = tl.exp(a - most), tl.exp(b - most)
        group_output = tl.load(outputs + group * heads * width + cell, mask=inside, other=0.0).to(tl.float32)
        total = (a / (a + b))[:, None] * total + (b / (a + b))[:, None] * group_output
    here = result + request.to(tl.int64) * heads * width + cell
    tl.store(here, total.to(result.dtype.element_ty), mask=inside)
