"""One process's end of the collective transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed import PrefixStore

from engine3d.platform import platform
from engine3d.platform.wire import Wire
from engine3d.rendezvous import join
from engine3d.reshard.describe.shards import RankShards
from engine3d.reshard.plan.coordinate import CollectiveOrder, Message
from engine3d.reshard.plan.rounds import longest_round
from engine3d.reshard.plan.transfers import Segments
from engine3d.reshard.transport.collective import CollectiveTransfer, Direction, Incoming, MessageMemory, Outgoing


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory in this process: its shards, and for each buffer a flat tensor of its elements."""

    shards: RankShards
    tensors: Sequence[torch.Tensor]


def message_memory(orders: Sequence[CollectiveOrder], device: torch.device) -> MessageMemory:
    """Allocate a trainer rank's message buffers for the largest of these transfers, of which one runs at a time."""
    directions: tuple[Direction, ...] = ("pack", "unpack")
    needed = dict.fromkeys(directions, 0)
    for order in orders:
        for direction, messages in zip(directions, (order.outgoing, order.incoming), strict=True):
            nbytes = longest_round([message.nbytes for message in messages], order.rounds)
            needed[direction] = max(needed[direction], nbytes)
    return MessageMemory(needed, device)


class Participant:
    """A rank that sends or receives over the process group; it meets the others when it is made.

    Args:
        order: its work.
        memory: for messages, or the device for memory of its own.
        source: memory that a trainer's rank sends from. None for an engine's rank.
        targets: memory that it receives into, by index among the targets.

    Raises:
        EngineError: another participant did not come in time.
    """

    def __init__(
        self,
        order: CollectiveOrder,
        memory: MessageMemory | torch.device,
        source: RankMemory | None,
        targets: Mapping[int, RankMemory],
    ) -> None:
        store = join(order.store, order.timeout_s)
        self._wire: Wire = platform.wire(PrefixStore(order.group, store), order.names, order.index, order.timeout_s)
        outgoing = [
            Outgoing(
                message.receiver,
                message.nbytes,
                _joined(message),
                source.tensors,
                [getattr(torch, dtype) for dtypes in message.dtypes for dtype in dtypes],
                source.shards.tensor_at,
            )
            for message in order.outgoing
            if source is not None
        ]
        incoming = [
            _incoming(message, [targets[transfer.target] for transfer in message.transfers])
            for message in order.incoming
        ]
        self._transfer = CollectiveTransfer(self._wire, order.rounds, outgoing, incoming, memory)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this participant sends for a version."""
        return self._transfer.nbytes

    @property
    def staged_bytes(self) -> int:
        """Memory that it takes for messages."""
        return self._transfer.staged_bytes

    def run(self, version: int) -> None:
        """Send and receive a version; return when this participant is done.

        Raises:
            EngineError: another participant is gone or was late; targets may hold a mixture of versions.
        """
        self._transfer.run(version)
        platform.synchronize()

    def close(self) -> None:
        """Leave the group."""
        self._wire.close()


def _incoming(message: Message, targets: Sequence[RankMemory]) -> Incoming:
    buffers = [(target, buffer) for target in targets for buffer in range(len(target.tensors))]

    def tensor_at(joined: int, element: int) -> str | None:
        target, buffer = buffers[joined]
        return target.shards.tensor_at(buffer, element)

    memory = [target.tensors[buffer] for target, buffer in buffers]
    return Incoming(message.sender, message.nbytes, _joined(message), memory, tensor_at)


def _joined(message: Message) -> Segments:
    """The segments of all transfers of a message, with the buffers of all its targets numbered consecutively."""
    first = accumulate((len(dtypes) for dtypes in message.dtypes), initial=0)
    return Segments.joined(
        [(transfer.segments, 0, base) for transfer, base in zip(message.transfers, first, strict=False)]
    )
