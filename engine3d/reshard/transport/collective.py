"""Transfers between hosts: packed into messages that go through staging buffers of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from engine3d.errors import EngineError
from engine3d.platform import platform
from engine3d.platform.copies import Copies, RunCopies
from engine3d.platform.wire import Exchange, Wire, WireError
from engine3d.reshard.plan.pieces import Pieces
from engine3d.reshard.plan.rounds import Column, fragments, message_sizes

Way = Literal["pack", "unpack"]
TensorAt = Callable[[int, int], str | None]
"""The HuggingFace tensor of an element of a buffer, by index of the buffer; for errors."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What this participant sends to another.

    Args:
        receiver: the other's index among the participants.
        nbytes: that go, as the plan counts them.
        pieces: what goes.
        sources: for each source buffer a flat tensor of its elements.
        dtypes: of each target buffer. Elements are cast before they are sent.
        tensor_at: of the source buffers.
    """

    receiver: int
    nbytes: int
    pieces: Pieces
    sources: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]
    tensor_at: TensorAt | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """What this participant receives from another.

    Args:
        sender: the other's index among the participants.
        nbytes: that come, as the plan counts them.
        pieces: what comes, the same as the sender's.
        targets: for each target buffer a flat tensor of its elements.
        tensor_at: of the target buffers.
    """

    sender: int
    nbytes: int
    pieces: Pieces
    targets: Sequence[torch.Tensor]
    tensor_at: TensorAt | None = None


class MessageMemory:
    """Message buffers that transfers have in common, of which one runs at a time: two of each direction, used in turn.

    Args:
        nbytes: that a transfer needs of each buffer of a direction at the most.
        device: of the memory.
    """

    def __init__(self, nbytes: Mapping[Way, int], device: torch.device) -> None:
        self._buffers = {
            way: [torch.empty(each, dtype=torch.uint8, device=device) for _ in range(2)] for way, each in nbytes.items()
        }
        self.nbytes = 2 * sum(nbytes.values())
        """Of all of them."""

    def buffers(self, way: Way, nbytes: int) -> list[torch.Tensor]:
        """The first bytes of both buffers of a direction."""
        return [each[:nbytes] for each in self._buffers[way]]


class CollectiveTransfer:
    """One participant's part of a transfer, built once and run for every version.

    While a round's messages are on the wire the next round's are packed.

    Args:
        wire: between the participants; each of them builds the transfer over it with the same rounds.
        rounds: that the transfer takes (`count_rounds`).
        outgoing, incoming: of this participant. Both ends of a pair have the same pieces and dtypes: each works out
            the pair's messages from its own.
        memory: where the messages are packed, or the device for memory of its own.

    Raises:
        ValueError: the pieces are not of so many bytes in this memory, so that the two ends would cut other messages.
    """

    def __init__(
        self,
        wire: Wire,
        rounds: int,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        memory: MessageMemory | torch.device,
    ) -> None:
        self._wire = wire
        self.rounds = rounds
        pack = [
            _Part("pack", each.receiver, each.pieces, each.sources, each.dtypes, each.tensor_at) for each in outgoing
        ]
        unpack = [
            _Part("unpack", each.sender, each.pieces, each.targets, [t.dtype for t in each.targets], each.tensor_at)
            for each in incoming
        ]
        planned = [*(each.nbytes for each in outgoing), *(each.nbytes for each in incoming)]
        for nbytes, part in zip(planned, [*pack, *unpack], strict=True):
            if part.nbytes != nbytes:
                raise ValueError(f"pieces of {part.nbytes} bytes to {part.way} for {part.peer}, planned {nbytes}")
        # They keep the memory, which copies on a GPU know by its address alone.
        self._parts = (*unpack, *pack)
        self._sent = _Staging(pack, "pack", self.rounds, wire.size, memory)
        self._received = _Staging(unpack, "unpack", self.rounds, wire.size, memory)
        self.nbytes = sum(part.nbytes for part in pack)
        self.staged_bytes = self._sent.nbytes + self._received.nbytes

    def run(self, version: int) -> None:
        """Send and receive everything. All participants call it equally often.

        On a GPU the last copies are enqueued on the current stream when this returns.

        Args:
            version: of the weights, for errors.

        Raises:
            EngineError: a peer is gone or was late, in this or an earlier run. The targets then hold parts of two
                versions.
        """
        under_way: Exchange | None = None
        for number in range(self.rounds + 1):
            current = number
            try:
                following = self._begin(number) if number < self.rounds else None
                current = number - 1
                if under_way is not None:
                    under_way.wait()
                    self._received.copy(current)
            except WireError as error:
                me = self._wire.names[self._wire.rank]
                doing = f"round {current + 1} of {self.rounds}{self._tensor(current, error.peers)}"
                raise EngineError(f"{me}: weights of version {version}, {doing}: {error}") from error
            under_way = following

    def _tensor(self, number: int, peers: Sequence[int]) -> str:
        """The first tensor of a round's messages with these peers, if it is known."""
        for part in self._parts:
            if part.peer in peers and (tensor := part.first_tensor(number, self.rounds)) is not None:
                return f", {tensor}"
        return ""

    def _begin(self, number: int) -> Exchange:
        self._sent.copy(number)
        return self._wire.exchange(
            self._sent.buffers[number % 2],
            self._received.buffers[number % 2],
            self._sent.sizes[number].tolist(),
            self._received.sizes[number].tolist(),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Pieces to or from one peer, and the memory at this end."""

    way: Way
    peer: int
    pieces: Pieces
    memory: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]
    tensor_at: TensorAt | None

    @property
    def itemsize(self) -> Column:
        """Of each piece's elements on the wire."""
        sizes = np.array([dtype.itemsize for dtype in self.dtypes], dtype=np.int64)
        return sizes[self.pieces.target_buffer]

    @property
    def nbytes(self) -> int:
        return int((self.pieces.rows * self.pieces.length * self.itemsize).sum())

    @property
    def places(self) -> tuple[Column, Column, Column]:
        """Buffer, offset and stride of each piece at this end."""
        pieces = self.pieces
        if self.way == "pack":
            return pieces.source_buffer, pieces.source_offset, pieces.source_stride
        return pieces.target_buffer, pieces.target_offset, pieces.target_stride

    def first_tensor(self, number: int, rounds: int) -> str | None:
        """The HuggingFace tensor that a round's message begins with."""
        some = fragments(self.pieces, self.itemsize, rounds)
        of_round = np.flatnonzero(some.round == number)
        if self.tensor_at is None or not len(of_round):
            return None
        first = of_round[some.offset[of_round].argmin()]
        buffer, offset, stride = (column[some.piece[first]] for column in self.places)
        return self.tensor_at(int(buffer), int(offset + some.row[first] * stride + some.column[first]))


class _Staging:
    """Two message buffers of one direction, and the copies of each round between them and the weights.

    Attributes:
        sizes: [rounds, participants] bytes of each message.
        buffers: the two, used in turn.
        nbytes: of both.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        way: Way,
        rounds: int,
        participants: int,
        memory: MessageMemory | torch.device,
    ) -> None:
        self.sizes = np.zeros((rounds, participants), dtype=np.int64)
        for part in parts:
            self.sizes[:, part.peer] = message_sizes(part.nbytes, rounds)
        longest = int(self.sizes.sum(axis=1).max(initial=0))
        memory = MessageMemory({way: longest}, memory) if isinstance(memory, torch.device) else memory
        self.buffers = memory.buffers(way, longest)
        self.nbytes = 2 * longest
        self._copies = self._rounds(parts, way, rounds) if parts else [_nothing] * rounds

    def copy(self, number: int) -> None:
        """Pack or unpack the messages of a round."""
        self._copies[number]()

    def _rounds(self, parts: Sequence[_Part], way: Way, rounds: int) -> list[RunCopies]:
        dtypes = sorted({dtype for part in parts for dtype in part.dtypes}, key=str)
        memory: list[torch.Tensor] = []
        columns: list[tuple[Column, ...]] = []
        starts = np.cumsum(self.sizes, axis=1) - self.sizes
        for route, part in enumerate(parts):
            columns.append(_columns(part, rounds, route, len(memory), dtypes, starts[:, part.peer]))
            memory += part.memory
        table = [np.concatenate(column) for column in zip(*columns, strict=True)]
        order = np.argsort(table[0], kind="stable")
        number, route_of, buffer, offset, stride, dtype, staged, rows, length = (column[order] for column in table)
        ends = np.searchsorted(number, np.arange(rounds + 1))
        views = [[each.view(dtype) for dtype in dtypes] for each in self.buffers]
        runs = []
        for index in range(rounds):
            which = slice(ends[index], ends[index + 1])
            weights = (memory, (buffer[which], offset[which], stride[which]))
            staging = (views[index % 2], (dtype[which], staged[which], length[which]))
            source, target = (weights, staging) if way == "pack" else (staging, weights)
            copies = Copies(
                source[0], target[0], route_of[which], *source[1], *target[1], rows=rows[which], length=length[which]
            )
            runs.append(platform.copy_runner(copies))
        return runs


def _columns(
    part: _Part,
    rounds: int,
    route: int,
    first_buffer: int,
    dtypes: list[torch.dtype],
    starts: Column,
) -> tuple[Column, ...]:
    """Of every fragment: its round and route, where it lies in the weights and in the staging, rows and length."""
    pieces, some = part.pieces, fragments(part.pieces, part.itemsize, rounds)
    buffer, offset, stride = part.places
    dtype = np.array([dtypes.index(dtype) for dtype in part.dtypes], dtype=np.int64)
    return (
        some.round,
        np.full(len(some.piece), route, dtype=np.int64),
        buffer[some.piece] + first_buffer,
        offset[some.piece] + some.row * stride[some.piece] + some.column,
        stride[some.piece],
        dtype[pieces.target_buffer[some.piece]],
        (starts[some.round] + some.offset) // part.itemsize[some.piece],
        some.rows,
        some.length,
    )


def _nothing() -> None:
    """No messages in this direction."""
