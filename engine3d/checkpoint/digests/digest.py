"""A number for the weights that a rank holds: the same for the same bits, and no others in all likelihood.

Cheap enough for every step: each rank reads its weights once, as they lie, and asks no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine3d.checkpoint.digests.terms import SPREAD, STEP, WORD
from engine3d.checkpoint.state import ParameterShard, parameter_shards

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

_CHUNK = 1 << 25
"""Bytes at a time; four times as many are taken in all."""
_MASTER = "master_param"
"""Key of the master weight in Transformer Engine's Adam, or of the half of it that the model's own weight lacks."""


def weights_digest(engine: TrainEngine) -> str:
    """Digest all that this rank holds: the master weights where it keeps some, in the order of the model's rules.

    A step of a run that is repeated on the same layout has the same weights where every rank has the same digest.
    Weights of which an optimizer keeps a shard in host memory are taken in while the next update has them on the
    device, from the first call on: to bring them there once more takes longer than all else.

    Returns:
        16 hexadecimal digits.
    """
    host = engine.host_state
    watch = host.watch if host is not None else None
    if isinstance(watch, _Shares):
        digest = Digest(engine.device, watch.nbytes)
        shares = watch.taken()
        for number, shard in enumerate(watch.parameters):
            if (share := shares.get(number)) is not None:
                digest.skip(watch.sizes[number], [share])
            else:
                for tensor in shard.weight_tensors():
                    digest.add(tensor)
        return digest.text()
    parameters = parameter_shards(engine)
    tensors = [shard.weight_tensors() for shard in parameters]
    sizes = [tuple(tensor.nbytes for tensor in of_one) for of_one in tensors]
    digest = Digest(engine.device, sum(map(sum, sizes)))
    for tensor in chain.from_iterable(tensors):
        digest.add(tensor)
    if host is not None and watch is None:
        host.watch = _Shares.of(parameters, sizes)
    return digest.text()


class Digest:
    """Takes in one tensor after another.

    Small ones are put together first: kernels for each of thousands of experts take longer than reading them all.

    Args:
        device: where it is computed.
        nbytes: of all that will be added.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._capacity, self._filled = _chunk_bytes(nbytes), 0
        self._value = torch.zeros((), dtype=torch.int64, device=device)
        self._multiplier = 1  # by which the value is to be multiplied yet
        self._shares: list[Tensor] = []
        self._lengths = 0
        self._together = torch.zeros(self._capacity, dtype=torch.uint8, device=device)
        self._coming: list[tuple[Tensor, Tensor]] = []
        self._factors = factors(nbytes, device)

    def add(self, values: Tensor) -> None:
        """Take in the bits of (n,) values, each weighted by its position. They may not be written to before `text`.

        Args:
            values: of any dtype.
        """
        values = values.detach().contiguous().view(torch.uint8)
        for start, fits in self._blocks(values.nbytes):
            into = self._together[self._filled : self._filled + fits]
            self._coming.append((into, values if fits == values.nbytes else values[start : start + fits]))

    def skip(self, sizes: Sequence[int], shares: Sequence[Tensor]) -> None:
        """Take in tensors of these numbers of bytes, one after another, without reading them.

        Args:
            shares: () int64 on the device, whose sum is that of what `share_of` gave for each of them.
        """
        self._shares += shares
        for size in sizes:
            for _ in self._blocks(size):
                pass

    def text(self) -> str:
        """16 hexadecimal digits; nothing is added after it."""
        self._take_in()
        value = self._value * _signed(self._multiplier)
        if self._shares:
            value = value + torch.stack(self._shares).sum()
        return f"{(int(value) + self._lengths) % (1 << 64):016x}"

    def _blocks(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the size of each block of a tensor. A block goes to the buffer at `_filled`."""
        self._lengths = (self._lengths * STEP + nbytes + 1) % (1 << 64)
        start = 0
        while start < nbytes:
            fits = min(nbytes - start, self._capacity - self._filled)
            yield start, fits
            start, self._filled = start + fits, self._filled + fits
            if self._filled == self._capacity:
                self._take_in()

    def _take_in(self) -> None:
        self._multiplier = self._multiplier * STEP % (1 << 64)
        if self._coming:
            # All in a few kernels where they are on the device.
            targets, sources = zip(*self._coming, strict=True)
            torch._foreach_copy_(targets, sources, non_blocking=True)
            chunk_sum = _chunk_sum(self._together.view(torch.int64), self._factors)
            self._value, self._multiplier = self._value * _signed(self._multiplier) + chunk_sum, 1
            self._together.zero_()
        self._filled, self._coming = 0, []


def share_of(values: Tensor, start: int, nbytes: int, of_words: Tensor) -> Tensor | None:
    """Compute a tensor's share of a digest. With it the tensor need not be read when all is added.

    Args:
        values: of any dtype, contiguous.
        start: bytes that are added before it.
        nbytes: of all that is added.
        of_words: `factors` of as many bytes, on the tensor's device.

    Returns:
        () int64 on their device; None for a tensor that is not made of aligned words.
    """
    if not _is_words(values, start):
        return None
    words, position = values.detach().view(-1).view(torch.uint8).view(torch.int64), start
    chunk_bytes, chunks = _chunk_bytes(nbytes), _chunks(nbytes)
    share = torch.zeros((), dtype=torch.int64, device=values.device)
    while len(words):
        chunk, within = divmod(position, chunk_bytes)
        fits = min(len(words), (chunk_bytes - within) // WORD)
        chunk_sum = _chunk_sum(words[:fits], of_words[within // WORD :][: fits + 1])
        share = share + chunk_sum * _signed(pow(STEP, chunks - 1 - chunk, 1 << 64))
        words, position = words[fits:], position + fits * WORD
    return share


class _Shares:
    """Shares taken in during the last update of weights with a shard in host memory: `HostState.watch`.

    Args:
        parameters: all that a rank holds.
        sizes: bytes of the tensors of each of these.
        positions: the index of a parameter and the bytes before it, by the state that has its master weight.

    Attributes:
        nbytes: of all.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterShard],
        sizes: Sequence[tuple[int, ...]],
        positions: dict[int, tuple[dict[str, Tensor], int, int]],
    ) -> None:
        self.parameters, self.sizes, self.nbytes = parameters, sizes, sum(map(sum, sizes))
        self._positions = positions
        self._factors: Tensor | None = None
        self._shares: dict[int, Tensor] = {}
        # By the first number of those that a kernel takes in, what it reads in host memory. The next update replaces
        # them, by when the kernels are done.
        self._tables: dict[int, Tensor] = {}

    @classmethod
    def of(cls, parameters: Sequence[ParameterShard], sizes: Sequence[tuple[int, ...]]) -> _Shares | None:
        """None where no optimizer has master weights in its state, or not yet."""
        positions, start = {}, 0
        for number, (shard, its_sizes) in enumerate(zip(parameters, sizes, strict=True)):
            if shard.optimizer is not None and _MASTER in shard.moments:
                state = shard.moments
                positions[id(state)] = (state, number, start)
            start += sum(its_sizes)
        return cls(parameters, sizes, positions) if positions else None

    def __call__(self, updated: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> None:
        """Take in parameters that have been updated, each with its state, both on the device."""
        numbers: list[int] = []
        tensors: list[Tensor] = []
        starts: list[int] = []
        owners: list[int] = []
        for parameter, state in updated:
            known, number, start = self._positions.get(id(state), (None, 0, 0))
            if known is not state:
                continue
            sizes = self.sizes[number]
            # The master weight is the last tensor: all of it, or what the parameter lacks.
            its_tensors = (parameter, state[_MASTER])[-len(sizes) :]
            its_starts = list(accumulate(sizes[:-1], initial=start))
            if all(map(_is_words, its_tensors, its_starts)):
                tensors += its_tensors
                starts += its_starts
                owners += [len(numbers)] * len(its_tensors)
                numbers.append(number)
        if not numbers:
            return
        shares = torch.zeros(len(numbers), dtype=torch.int64, device=tensors[0].device)
        if tensors[0].is_cuda:
            from engine3d.checkpoint.digests.kernels import add_shares

            chunk_bytes, chunks = _chunk_bytes(self.nbytes), _chunks(self.nbytes)
            self._tables[numbers[0]] = add_shares(tensors, starts, owners, shares, chunk=chunk_bytes, chunks=chunks)
        else:
            if self._factors is None:
                self._factors = factors(self.nbytes, shares.device)
            for tensor, start, owner in zip(tensors, starts, owners, strict=True):
                share = share_of(tensor, start, self.nbytes, self._factors)
                assert share is not None
                shares[owner] += share
        self._shares |= zip(numbers, shares.unbind(), strict=True)

    def taken(self) -> dict[int, Tensor]:
        """Return and clear the shares of the last update: () int64 by index of the parameter, the sum of `share_of`
        over its tensors."""
        taken, self._shares, self._factors = self._shares, {}, None
        return taken


def _chunk_bytes(nbytes: int) -> int:
    """Bytes that are taken in at a time, a multiple of a word."""
    return max(1, -(-min(nbytes, _CHUNK) // WORD)) * WORD


def _chunks(nbytes: int) -> int:
    """Count the chunks of a number of bytes. The last one may be empty."""
    return nbytes // _chunk_bytes(nbytes) + 1


def _is_words(values: Tensor, start: int) -> bool:
    """True if a tensor consists of aligned words and begins on a word."""
    return not (start % WORD or values.nbytes % WORD or values.storage_offset() * values.itemsize % WORD)


def factors(nbytes: int, device: torch.device) -> Tensor:
    """Compute the factors of the words of a chunk, and one more, for a total of `nbytes`."""
    return (torch.arange(_chunk_bytes(nbytes) // WORD + 1, device=device) * SPREAD).bitwise_or_(1)


def _chunk_sum(words: Tensor, of_words: Tensor) -> Tensor:
    """(n,) words of a chunk and n + 1 factors -> ()."""
    # All of it modulo 2^64, where a factor moves bits up only: upper halves are multiplied on their own too.
    return (words * of_words[:-1]).addcmul_(words >> 32, of_words[1:]).sum()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
