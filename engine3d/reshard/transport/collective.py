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
from engine3d.platform.wire import PendingExchange, Wire, WireError
from engine3d.reshard.plan.rounds import Column, fragments, message_sizes
from engine3d.reshard.plan.transfers import Segments

Direction = Literal["pack", "unpack"]
TensorAt = Callable[[int, int], str | None]
"""The HuggingFace tensor of an element of a buffer, by index of the buffer; for errors."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Segments that this participant sends to another.

    Args:
        receiver: the other's index among the participants.
        nbytes: that go, as the plan counts them.
        segments: elements that go.
        sources: for each source buffer a flat tensor of its elements.
        dtypes: of each target buffer. Elements are cast before they are sent.
        tensor_at: of the source buffers.
    """

    receiver: int
    nbytes: int
    segments: Segments
    sources: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]
    tensor_at: TensorAt | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """Segments that this participant receives from another.

    Args:
        sender: the other's index among the participants.
        nbytes: that come, as the plan counts them.
        segments: elements that come, the same as the sender's.
        targets: for each target buffer a flat tensor of its elements.
        tensor_at: of the target buffers.
    """

    sender: int
    nbytes: int
    segments: Segments
    targets: Sequence[torch.Tensor]
    tensor_at: TensorAt | None = None


class MessageMemory:
    """Message buffers that transfers share, of which one runs at a time: two of each direction, used in turn.

    Args:
        nbytes: that a transfer needs of each buffer of a direction at the most.
        device: of the memory.
    """

    def __init__(self, nbytes: Mapping[Direction, int], device: torch.device) -> None:
        self._buffers = {
            direction: [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
            for direction, size in nbytes.items()
        }
        self.nbytes = 2 * sum(nbytes.values())
        """Of all of them."""

    def buffers(self, direction: Direction, nbytes: int) -> list[torch.Tensor]:
        """The first bytes of both buffers of a direction."""
        return [buffer[:nbytes] for buffer in self._buffers[direction]]


class CollectiveTransfer:
    """One participant's end of a transfer, built once and run for every version.

    While a round's messages are on the wire the next round's are packed.

    Args:
        wire: between the participants; each of them builds the transfer over it with the same rounds.
        rounds: that the transfer takes (`count_rounds`).
        outgoing, incoming: of this participant. Both ends of a pair have the same segments and dtypes: each computes
            the pair's messages from its own.
        memory: where the messages are packed, or the device for memory of its own.

    Raises:
        ValueError: the segments do not have these bytes in this memory, so that the two ends would cut other messages.
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
            _PeerStream("pack", message.receiver, message.segments, message.sources, message.dtypes, message.tensor_at)
            for message in outgoing
        ]
        unpack = [
            _PeerStream(
                "unpack",
                message.sender,
                message.segments,
                message.targets,
                [t.dtype for t in message.targets],
                message.tensor_at,
            )
            for message in incoming
        ]
        planned = [*(sent.nbytes for sent in outgoing), *(received.nbytes for received in incoming)]
        for nbytes, stream in zip(planned, [*pack, *unpack], strict=True):
            if stream.nbytes != nbytes:
                raise ValueError(
                    f"segments of {stream.nbytes} bytes to {stream.direction} for {stream.peer}, planned {nbytes}"
                )
        # They keep the memory alive, which copies on a GPU know by its address alone.
        self._streams = (*unpack, *pack)
        self._sent = _Staging(pack, "pack", self.rounds, wire.size, memory)
        self._received = _Staging(unpack, "unpack", self.rounds, wire.size, memory)
        self.nbytes = sum(stream.nbytes for stream in pack)
        self.staged_bytes = self._sent.nbytes + self._received.nbytes

    def run(self, version: int) -> None:
        """Send and receive everything. All participants call it equally often.

        On a GPU the last copies are enqueued on the current stream when this returns.

        Args:
            version: of the weights, for errors.

        Raises:
            EngineError: a peer is gone or was late, in this or an earlier run. The targets then hold a mixture of two
                versions.
        """
        in_flight: PendingExchange | None = None
        for number in range(self.rounds + 1):
            current = number
            try:
                following = self._begin(number) if number < self.rounds else None
                current = number - 1
                if in_flight is not None:
                    in_flight.wait()
                    self._received.copy(current)
            except WireError as error:
                me = self._wire.names[self._wire.rank]
                doing = f"round {current + 1} of {self.rounds}{self._tensor(current, error.peers)}"
                raise EngineError(f"{me}: weights of version {version}, {doing}: {error}") from error
            in_flight = following

    def _tensor(self, number: int, peers: Sequence[int]) -> str:
        """The first tensor of a round's messages with these peers, if it is known."""
        for stream in self._streams:
            if stream.peer in peers and (tensor := stream.first_tensor(number, self.rounds)) is not None:
                return f", {tensor}"
        return ""

    def _begin(self, number: int) -> PendingExchange:
        self._sent.copy(number)
        return self._wire.exchange(
            self._sent.buffers[number % 2],
            self._received.buffers[number % 2],
            self._sent.sizes[number].tolist(),
            self._received.sizes[number].tolist(),
        )


@dataclass(frozen=True, slots=True)
class _PeerStream:
    """Segments to or from one peer, and the memory at this end."""

    direction: Direction
    peer: int
    segments: Segments
    memory: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]
    tensor_at: TensorAt | None

    @property
    def itemsize(self) -> Column:
        """Bytes of an element of each segment on the wire."""
        sizes = np.array([dtype.itemsize for dtype in self.dtypes], dtype=np.int64)
        return sizes[self.segments.target_buffer]

    @property
    def nbytes(self) -> int:
        return int((self.segments.rows * self.segments.length * self.itemsize).sum())

    @property
    def positions(self) -> tuple[Column, Column, Column]:
        """Buffer, offset and stride of each segment at this end."""
        segments = self.segments
        if self.direction == "pack":
            return segments.source_buffer, segments.source_offset, segments.source_stride
        return segments.target_buffer, segments.target_offset, segments.target_stride

    def first_tensor(self, number: int, rounds: int) -> str | None:
        """The HuggingFace tensor that a round's message begins with."""
        message_fragments = fragments(self.segments, self.itemsize, rounds)
        of_round = np.flatnonzero(message_fragments.round == number)
        if self.tensor_at is None or not len(of_round):
            return None
        first = of_round[message_fragments.offset[of_round].argmin()]
        buffer, offset, stride = (column[message_fragments.segment[first]] for column in self.positions)
        return self.tensor_at(
            int(buffer), int(offset + message_fragments.row[first] * stride + message_fragments.column[first])
        )


class _Staging:
    """Two message buffers of one direction, and the copies of each round between them and the weights.

    Attributes:
        sizes: [rounds, participants] bytes of each message.
        buffers: the two, used in turn.
        nbytes: of both.
    """

    def __init__(
        self,
        streams: Sequence[_PeerStream],
        direction: Direction,
        rounds: int,
        participants: int,
        memory: MessageMemory | torch.device,
    ) -> None:
        self.sizes = np.zeros((rounds, participants), dtype=np.int64)
        for stream in streams:
            self.sizes[:, stream.peer] = message_sizes(stream.nbytes, rounds)
        longest = int(self.sizes.sum(axis=1).max(initial=0))
        memory = MessageMemory({direction: longest}, memory) if isinstance(memory, torch.device) else memory
        self.buffers = memory.buffers(direction, longest)
        self.nbytes = 2 * longest
        self._copies = self._rounds(streams, direction, rounds) if streams else [_nothing] * rounds

    def copy(self, number: int) -> None:
        """Pack or unpack the messages of a round."""
        self._copies[number]()

    def _rounds(self, streams: Sequence[_PeerStream], direction: Direction, rounds: int) -> list[RunCopies]:
        dtypes = sorted({dtype for stream in streams for dtype in stream.dtypes}, key=str)
        memory: list[torch.Tensor] = []
        columns: list[tuple[Column, ...]] = []
        starts = np.cumsum(self.sizes, axis=1) - self.sizes
        for route, stream in enumerate(streams):
            columns.append(_columns(stream, rounds, route, len(memory), dtypes, starts[:, stream.peer]))
            memory += stream.memory
        table = [np.concatenate(column) for column in zip(*columns, strict=True)]
        order = np.argsort(table[0], kind="stable")
        number, route_of, buffer, offset, stride, dtype, staged, rows, length = (column[order] for column in table)
        ends = np.searchsorted(number, np.arange(rounds + 1))
        views = [[buffer.view(dtype) for dtype in dtypes] for buffer in self.buffers]
        runs = []
        for index in range(rounds):
            which = slice(ends[index], ends[index + 1])
            weights = (memory, (buffer[which], offset[which], stride[which]))
            staging = (views[index % 2], (dtype[which], staged[which], length[which]))
            source, target = (weights, staging) if direction == "pack" else (staging, weights)
            copies = Copies(
                source[0], target[0], route_of[which], *source[1], *target[1], rows=rows[which], length=length[which]
            )
            runs.append(platform.copy_runner(copies))
        return runs


def _columns(
    stream: _PeerStream,
    rounds: int,
    route: int,
    first_buffer: int,
    dtypes: list[torch.dtype],
    starts: Column,
) -> tuple[Column, ...]:
    """List every fragment: its round and route, its position in the weights and in the staging, rows and length."""
    segments, message_fragments = stream.segments, fragments(stream.segments, stream.itemsize, rounds)
    buffer, offset, stride = stream.positions
    dtype = np.array([dtypes.index(dtype) for dtype in stream.dtypes], dtype=np.int64)
    return (
        message_fragments.round,
        np.full(len(message_fragments.segment), route, dtype=np.int64),
        buffer[message_fragments.segment] + first_buffer,
        offset[message_fragments.segment]
        + message_fragments.row * stride[message_fragments.segment]
        + message_fragments.column,
        stride[message_fragments.segment],
        dtype[segments.target_buffer[message_fragments.segment]],
        (starts[message_fragments.round] + message_fragments.offset) // stream.itemsize[message_fragments.segment],
        message_fragments.rows,
        message_fragments.length,
    )


def _nothing() -> None:
    """No messages in this direction."""
