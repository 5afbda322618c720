"""Trainer's end of a transfer: it shares the memory of its weights, and writes them into the engines."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine3d.platform import platform
from engine3d.platform.copies import CopyMethod
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Buffer, RankShards
from engine3d.reshard.plan.coordinate import SendOrder
from engine3d.reshard.plan.transfers import Link
from engine3d.reshard.transport.collective import MessageMemory
from engine3d.reshard.transport.participant import Participant, RankMemory, message_memory
from engine3d.reshard.transport.program import CopyProgram, Route, flat

Transport = Literal["one_sided", "collective"]


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that one rank sent over one transport, and seconds from its first copy until all were done."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Outlet:
    """Transfer of one rank to some of the engines."""

    program: CopyProgram
    participant: Participant | None

    def send(self, version: int) -> dict[Transport, Sent]:
        sent: dict[Transport, Sent] = {}
        platform.synchronize()
        if self.program.nbytes:
            start = time.perf_counter()
            self.program.run()
            platform.synchronize()
            sent["one_sided"] = Sent(self.program.nbytes, time.perf_counter() - start)
        if self.participant is not None:
            start = time.perf_counter()
            self.participant.run(version)
            sent["collective"] = Sent(self.participant.sent_bytes, time.perf_counter() - start)
        return sent


class WeightSender:
    """Weights of one rank, and their transfer to the engines.

    Args:
        shards: of the rank.
        storages: the memory of each buffer of the shards.
        updates: bring merged, then quantised memory up to date with the parameters. Called once for each
            version: before its first transfer, or one that is repeated.
        base: fingerprint of the model under adapters that engines get apart from it; None elsewhere.
    """

    def __init__(
        self,
        shards: RankShards,
        storages: Sequence[torch.UntypedStorage],
        *updates: Callable[[], None],
        base: str | None = None,
    ) -> None:
        self.shards = shards
        self._base = base
        self._updates = updates
        self._updated: int | None = None
        self._sent: set[int] = set()
        self._storages = tuple(storages)
        self._outlets: list[_Outlet] = []
        self._messages: MessageMemory | None = None

    def share(self) -> SharedShards:
        """The shards, with handles by which other processes of the node can map their memory."""
        handles = tuple(platform.share_memory(storage) for storage in self._storages)
        return SharedShards(self.shards, handles, base=self._base)

    def publish(self, path: Path) -> None:
        """Write the result of `share` to a file, atomically."""
        partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(pickle.dumps(self.share()))
        partial.replace(path)

    def connect(self, *orders: SendOrder, method: CopyMethod | None = None) -> None:
        """Make ready to send: map the memory that is written, build the copies, join the collective transport's group.

        Args:
            orders: from `coordinate`, one for each transfer that is made by itself. All ranks connect them in the same
                order.
            method: how a GPU copies; the platform's choice if None.
        """
        self.close()
        device = self._storages[0].device
        collective = [order.collective for order in orders if order.collective is not None]
        self._messages = message_memory(collective, device)
        for order in orders:
            self._outlets.append(self._outlet(order, method, self._messages))

    def _outlet(self, order: SendOrder, method: CopyMethod | None, messages: MessageMemory) -> _Outlet:
        sources = flat_buffers(self.shards.buffers, self._storages)
        targets = {index: mapped(shared) for index, shared in order.targets.items()}
        program = CopyProgram(
            [
                Route(transfer.segments, sources, targets[transfer.target], near=transfer.link is Link.DEVICE)
                for transfer in order.one_sided
            ],
            method,
        )
        participant = None
        if order.collective is not None:
            target_memory = {
                index: RankMemory(shared.shards, targets[index]) for index, shared in order.targets.items()
            }
            participant = Participant(order.collective, messages, RankMemory(self.shards, sources), target_memory)
        return _Outlet(program, participant)

    def send(self, version: int, transfer: int = 0) -> dict[Transport, Sent]:
        """Write this rank's shards of `version` into the engines. Returns when all of them are written.

        Args:
            version: of the weights.
            transfer: index of the connected transfer.

        Raises:
            EngineError: another rank of the collective transport failed or did not answer in time.
        """
        assert self._outlets, "connect comes first"
        if version != self._updated or transfer in self._sent:
            for update in self._updates:
                update()
            self._updated, self._sent = version, set()
        self._sent.add(transfer)
        return self._outlets[transfer].send(version)

    @property
    def staged_bytes(self) -> int:
        """Memory that the collective transport takes for messages."""
        return self._messages.nbytes if self._messages is not None else 0

    def close(self) -> None:
        """Unmap the memory of other ranks, and leave the collective transport's groups."""
        outlets, self._outlets, self._messages = self._outlets, [], None
        self._updated, self._sent = None, set()
        for outlet in outlets:
            if outlet.participant is not None:
                outlet.participant.close()


def flat_buffers(buffers: Sequence[Buffer], storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Each buffer's memory as a flat tensor of its elements."""
    return [
        flat(storage, getattr(torch, buffer.dtype), 0, storage.nbytes() // buffer.itemsize)
        for buffer, storage in zip(buffers, storages, strict=True)
    ]


def mapped(shared: SharedShards) -> list[torch.Tensor]:
    """Another rank's buffers in this process's address space; those that it borrowed itself are empty."""
    return [
        flat(platform.map_memory(handle), getattr(torch, buffer.dtype), 0, buffer.elements)
        if handle is not None
        else torch.empty(0, dtype=getattr(torch, buffer.dtype))
        for buffer, handle in zip(shared.shards.buffers, shared.handles, strict=True)
    ]
