"""One process's end of the collective transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed import PrefixStore

from engine3d.platform import platform
from engine3d.platform.wire import Wire
from engine3d.reshard.describe.shards import Shards
from engine3d.reshard.plan.coordinate import CollectiveOrder, Message
from engine3d.reshard.plan.pieces import Pieces
from engine3d.reshard.plan.rounds import longest_round
from engine3d.reshard.transport.collective import CollectiveTransfer, Incoming, MessageMemory, Outgoing, Way
from engine3d.stores import join


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's memory in this process: its shards, and for each buffer a flat tensor of its elements."""

    shards: Shards
    tensors: Sequence[torch.Tensor]


def message_memory(orders: Sequence[CollectiveOrder], device: torch.device) -> MessageMemory:
    """What a trainer's rank needs for messages in the largest of these transfers, of which one runs at a time."""
    ways: tuple[Way, ...] = ("pack", "unpack")
    needed = dict.fromkeys(ways, 0)
    for order in orders:
        for way, messages in zip(ways, (order.outgoing, order.incoming), strict=True):
            nbytes = longest_round([message.nbytes for message in messages], order.rounds)
            needed[way] = max(needed[way], nbytes)
    return MessageMemory(needed, device)


class Participant:
    """A rank that sends or receives over the process group; it meets the others when it is made.

    Args:
        order: its part.
        memory: for messages, or the device for memory of its own.
        source: what a trainer's rank sends from; None for an engine's rank.
        targets: what it receives into, by index among the targets.

    Raises:
        EngineError: another participant did not come in time.
    """

    def __init__(
        self,
        order: CollectiveOrder,
        memory: MessageMemory | torch.device,
        source: Held | None,
        targets: Mapping[int, Held],
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
            _incoming(message, [targets[each.target] for each in message.transfers]) for message in order.incoming
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
        """Send and receive a version; return when this participant's part is done.

        Raises:
            EngineError: another participant is gone or was late; targets may hold a mixture of versions.
        """
        self._transfer.run(version)
        platform.synchronize()

    def close(self) -> None:
        """Leave the group."""
        self._wire.close()


def _incoming(message: Message, targets: Sequence[Held]) -> Incoming:
    buffers = [(held, buffer) for held in targets for buffer in range(len(held.tensors))]

    def tensor_at(joined: int, element: int) -> str | None:
        held, buffer = buffers[joined]
        return held.shards.tensor_at(buffer, element)

    memory = [held.tensors[buffer] for held, buffer in buffers]
    return Incoming(message.sender, message.nbytes, _joined(message), memory, tensor_at)


def _joined(message: Message) -> Pieces:
    """The pieces of all transfers of a message, with the buffers of all its targets counted through."""
    first = accumulate((len(dtypes) for dtypes in message.dtypes), initial=0)
    return Pieces.joined([(transfer.pieces, 0, base) for transfer, base in zip(message.transfers, first, strict=False)])
