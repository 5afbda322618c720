"""Kernels that exchange tensors between GPUs by writing into each other's memory.

A tensor goes in slots, of one size whatever the tensor. A program puts its slots into the memory of the other GPUs,
each with a flag after it, then waits for the flags of theirs and takes what they have put. A slot's number of exchanges
is its flag, and says which of two halves the slot uses: when a half is used again, every GPU has begun the exchange
between the two, so that it has ended the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SLOT_BYTES = 8192
_PROGRAMS = 128
"""Most programs, all of which a GPU runs at once: each waits for the same one of every other GPU."""
_WARPS = 8
_TRY_S = 2e-7
"""Least duration of one read of the flags."""
_MOST_TRIES = 2**31 - 1


@dataclass(frozen=True)
class ExchangeBuffer:
    """Layout of a GPU's buffer for the others: flags, int32 (slots, ranks), then two halves of (slots, ranks) slots.

    Args:
        slots: of a rank's tensor, at most.
        ranks: that exchange.
    """

    slots: int
    ranks: int

    @staticmethod
    def of(nbytes: int, ranks: int) -> ExchangeBuffer:
        """Make a layout for at most `nbytes` of all ranks' tensors together."""
        return ExchangeBuffer(triton.cdiv(nbytes, SLOT_BYTES * ranks), ranks)

    @property
    def flags(self) -> int:
        """Bytes of the flags."""
        return triton.cdiv(4 * self.slots * self.ranks, SLOT_BYTES) * SLOT_BYTES

    @property
    def half(self) -> int:
        """Bytes of each of the two halves."""
        return self.slots * self.ranks * SLOT_BYTES

    @property
    def nbytes(self) -> int:
        return self.flags + 2 * self.half


class ExchangeKernels:
    """The kernels of one rank.

    Args:
        mine: its number.
        addresses: of each rank's buffer, which is all zeros at first.
        layout: of each buffer.
        timeout_s: how long a kernel waits at least before it ends the process with an error of CUDA.
        device: of this rank's tensors.
    """

    def __init__(
        self, mine: int, addresses: Sequence[int], layout: ExchangeBuffer, timeout_s: float, device: str = "cuda"
    ) -> None:
        self._mine, self._layout = mine, layout
        self._flags = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._halves = self._flags + layout.flags
        self._counts = torch.zeros(layout.slots, dtype=torch.int32, device=device)
        self._tries = min(_MOST_TRIES, round(timeout_s / _TRY_S))
        self._traps = device == "cuda"  # which the interpreter cannot

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """See `PeerExchange.all_gather`."""
        words = tensor.nbytes // 8
        self._run(
            _all_gather, tensor.view(-1).view(torch.int64), into.view(-1).view(torch.int64), words, SLOT_BYTES // 8
        )

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """See `PeerExchange.reduce_scatter`."""
        self._run(_reduce_scatter, tensor, into, into.numel(), SLOT_BYTES // into.itemsize)

    def _run(
        self, kernel: triton.JITFunction, tensor: torch.Tensor, into: torch.Tensor, count: int, of_slot: int
    ) -> None:
        slots = triton.cdiv(count, of_slot)
        if not slots:
            return
        kernel[(min(slots, _PROGRAMS),)](
            self._flags,
            self._halves,
            self._counts,
            tensor,
            into,
            count,
            self._mine,
            self._layout.half,
            self._tries,
            RANKS=self._layout.ranks,
            PADDED=triton.next_power_of_2(self._layout.ranks),
            OF_SLOT=of_slot,
            SLOT_BYTES=SLOT_BYTES,
            TRAPS=self._traps,
            num_warps=_WARPS,
        )


@triton.jit
def _others(addresses, mine, RANKS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(PADDED, 1): every rank, whether it is another one than this, and its address."""
    rank = tl.arange(0, PADDED)[:, None]
    others = (rank < RANKS) & (rank != mine)
    return rank, others, tl.load(addresses + rank, mask=others, other=0)


@triton.jit
def _signal(flags, others, mine, slot, count, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signal the other ranks that this program has written into a slot of theirs.

    One operation signals all of them: each waits until the writes have arrived.
    """
    tl.debug_barrier()
    flag = flags.to(tl.pointer_type(tl.int32)) + (slot * RANKS + mine)
    tl.atomic_xchg(flag, tl.zeros_like(flags).to(tl.int32) + count, mask=others, sem="release", scope="sys")


@triton.jit
def _least(flag, others, count):  # type: ignore[no-untyped-def]
    """The least of the other ranks' flags, or `count` if that is less; what came before them may be read then."""
    values = tl.atomic_add(flag, tl.zeros_like(others).to(tl.int32), mask=others, sem="acquire", scope="sys")
    return tl.min(tl.where(others, values, count))


@triton.jit
def _await(flags, rank, others, mine, slot, count, tries, RANKS: tl.constexpr, TRAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the other ranks have put theirs into a slot here."""
    flag = tl.load(flags + mine).to(tl.pointer_type(tl.int32)) + (slot * RANKS + rank)
    seen = _least(flag, others, count)
    tried = 0
    while (seen < count) & (tried < tries):
        seen = _least(flag, others, count)
        tried += 1
    if TRAPS and seen < count:
        tl.device_print("nothing came in time from another GPU to rank", mine)
        tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _slot_pointers(  # type: ignore[no-untyped-def]
    halves, slot, source, count, half, kind: tl.constexpr, RANKS: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """Pointers to a slot of `source` in the buffers at `halves`. Either argument is of one rank."""
    there = halves + (count & 1) * half + (slot * RANKS + source) * SLOT_BYTES
    return tl.multiple_of(there.to(tl.pointer_type(kind)), [16, 16])


@triton.jit(do_not_specialize=["mine", "tries"])
def _all_gather(  # type: ignore[no-untyped-def]
    flags,
    halves,
    counts,
    tensor,
    into,
    words,
    mine,
    half,
    tries,
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,
    OF_SLOT: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    TRAPS: tl.constexpr,
):
    # A word of 16 bytes is two elements of 8, which the compiler joins into one access. All ranks' at once: a load that
    # comes after a store is not begun before it.
    rank, others, their_flags = _others(flags, mine, RANKS, PADDED)
    _, _, their_halves = _others(halves, mine, RANKS, PADDED)
    my_halves = tl.load(halves + mine + tl.zeros_like(rank))
    element = tl.arange(0, OF_SLOT)[None, :]
    slots = tl.cdiv(words, OF_SLOT)
    for slot in range(tl.program_id(0), slots, tl.num_programs(0)):
        count = tl.load(counts + slot) + 1
        word = slot * OF_SLOT + element
        value = tl.load(tensor + word, mask=word < words)
        there = _slot_pointers(their_halves, slot, mine, count, half, tl.int64, RANKS, SLOT_BYTES)
        tl.store(there + element, tl.broadcast_to(value, PADDED, OF_SLOT), mask=others & (word < words))
        _signal(their_flags, others, mine, slot, count, RANKS)
    for slot in range(tl.program_id(0), slots, tl.num_programs(0)):
        count = tl.load(counts + slot) + 1
        word = slot * OF_SLOT + element
        tl.store(into + mine * words + word, tl.load(tensor + word, mask=word < words), mask=word < words)
        _await(flags, rank, others, mine, slot, count, tries, RANKS, TRAPS)
        here = _slot_pointers(my_halves, slot, rank, count, half, tl.int64, RANKS, SLOT_BYTES)
        value = tl.load(here + element, mask=others & (word < words), cache_modifier=".cg")
        tl.store(into + rank * words + word, value, mask=others & (word < words))
        tl.debug_barrier()
        tl.store(counts + slot, count)


@triton.jit(do_not_specialize=["mine", "tries"])
def _reduce_scatter(  # type: ignore[no-untyped-def]
    flags,
    halves,
    counts,
    tensor,
    into,
    elements,
    mine,
    half,
    tries,
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,
    OF_SLOT: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    TRAPS: tl.constexpr,
):
    kind = into.dtype.element_ty
    rank, others, their_flags = _others(flags, mine, RANKS, PADDED)
    _, _, their_halves = _others(halves, mine, RANKS, PADDED)
    my_half = tl.load(halves + mine)
    element = tl.arange(0, OF_SLOT)
    slots = tl.cdiv(elements, OF_SLOT)
    for slot in range(tl.program_id(0), slots, tl.num_programs(0)):
        count = tl.load(counts + slot) + 1
        at = (slot * OF_SLOT + element)[None, :]
        value = tl.load(tensor + rank * elements + at, mask=others & (at < elements))
        there = _slot_pointers(their_halves, slot, mine, count, half, kind, RANKS, SLOT_BYTES)
        tl.store(there + element[None, :], value, mask=others & (at < elements))
        _signal(their_flags, others, mine, slot, count, RANKS)
    for slot in range(tl.program_id(0), slots, tl.num_programs(0)):
        count = tl.load(counts + slot) + 1
        at = slot * OF_SLOT + element
        local = tl.load(tensor + mine * elements + at, mask=at < elements, other=0.0)
        _await(flags, rank, others, mine, slot, count, tries, RANKS, TRAPS)
        total = tl.zeros((OF_SLOT,), dtype=tl.float32)
        for source in tl.static_range(RANKS):
            here = my_half + (count & 1) * half + (slot * RANKS + source) * SLOT_BYTES
            put = tl.load(
                tl.multiple_of(here.to(tl.pointer_type(kind)), 16) + element,
                mask=(at < elements) & (source != mine),
                other=0.0,
                cache_modifier=".cg",
            )
            total += tl.where(source == mine, local, put).to(tl.float32)
        tl.store(into + at, total.to(kind), mask=at < elements)
        tl.debug_barrier()
        tl.store(counts + slot, count)
