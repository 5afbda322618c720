"""The kernel of `digest` for GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine3d.checkpoint.digests.terms import SPREAD, STEP, WORD
from engine3d.platform import platform

_RUN = 8192
"""Words that a program reads at most."""
_WIDTH = 2048
"""Words that a program reads at a time."""
_COLUMNS = 5
"""Columns of a run of words within a chunk: address, words, index in the chunk, the chunk's multiplier, owner."""


def add_shares(
    values: Sequence[Tensor], starts: Sequence[int], owners: Sequence[int], into: Tensor, *, chunk: int, chunks: int
) -> Tensor:
    """Add to (n,) int64 what `share_of` gives for tensors, in one kernel on the current stream.

    Args:
        values: contiguous, of any dtype, each of words that begin at a multiple of `WORD` bytes.
        starts: bytes that are added before each of them, multiples of `WORD`.
        owners: the element of `into` for each of them.
        chunk: bytes of a chunk, a multiple of `WORD`.
        chunks: in all.

    Returns:
        page-locked host memory that the kernel reads, to be kept until the kernel is done. A copy of it to the device
        would wait for all copies that were queued before, whatever their stream: they have one queue.
    """
    table = _runs(values, starts, owners, chunk // WORD, chunks)
    if len(table):
        _add_shares[(len(table),)](table, into, COLUMNS=_COLUMNS, SPREAD=SPREAD, WIDTH=_WIDTH)
    return table


def _runs(values: Sequence[Tensor], starts: Sequence[int], owners: Sequence[int], in_chunk: int, chunks: int) -> Tensor:
    """(runs, _COLUMNS) int64: each ends where its tensor, its chunk, or a block of `_RUN` words of the chunk ends."""
    runs = triton.cdiv(in_chunk, _RUN)
    address = np.array([tensor.data_ptr() for tensor in values], dtype=np.int64)
    first = np.array(starts, dtype=np.int64) // WORD
    after = first + np.array([tensor.nbytes for tensor in values], dtype=np.int64) // WORD

    def run_of(word: np.ndarray) -> np.ndarray:
        return word // in_chunk * runs + word % in_chunk // _RUN

    counts = run_of(after - 1) + 1 - run_of(first)
    of = np.repeat(np.arange(len(values)), counts)
    run = run_of(first)[of] + np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
    chunk, within = run // runs, run % runs * _RUN
    begin = np.maximum(chunk * in_chunk + within, first[of])
    end = np.minimum(chunk * in_chunk + np.minimum(within + _RUN, in_chunk), after[of])
    # STEP^(chunks - 1) ... 1, modulo 2^64.
    multiplier = np.multiply.accumulate(np.array([1] + [STEP] * (chunks - 1), dtype=np.int64))[::-1]

    table = platform.host_scratch(8 * _COLUMNS * len(of)).view(torch.int64).view(len(of), _COLUMNS)
    columns = (address[of] + WORD * (begin - first[of]), end - begin, begin - chunk * in_chunk, multiplier[chunk])
    np.stack((*columns, np.array(owners)[of]), axis=1, out=table.numpy())
    return table


@triton.jit
def _add_shares(table, into, COLUMNS: tl.constexpr, SPREAD: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    run = table + tl.program_id(0) * COLUMNS
    words = tl.load(run).to(tl.pointer_type(tl.int64))
    count = tl.load(run + 1).to(tl.int32)
    index, multiplier, owner = tl.load(run + 2), tl.load(run + 3), tl.load(run + 4)
    total = tl.zeros((WIDTH,), dtype=tl.int64)
    for start in range(0, count, WIDTH):
        here = start + tl.arange(0, WIDTH)
        word = tl.load(words + here, mask=here < count, other=0)
        spread = (index + here) * SPREAD
        # As `_chunk_sum`: the upper half by the next word's factor.
        total += word * (spread | 1) + (word >> 32) * ((spread + SPREAD) | 1)
    tl.atomic_add(into + owner, tl.sum(total, axis=0) * multiplier, sem="relaxed")
