"""Shards together with the means to reach their memory from another process."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from engine3d.platform.interface import MemoryHandle
from engine3d.reshard.describe.shards import RankShards


@dataclass(frozen=True, slots=True)
class SharedShards:
    """A rank's shards and, for each buffer, the handle that maps it in another process of the node.

    A buffer that is another rank's memory has None.

    Args:
        shards: the rank's.
        handles: one for each buffer.
        pulls: true for an engine's rank that releases its memory between transfers, so that nobody can map it. It has
            no handles, and reads what it needs from the memory of trainer's ranks.
        base: of the trainer's first rank: fingerprint of the model under adapters that engines get apart from it.
    """

    shards: RankShards
    handles: tuple[MemoryHandle | None, ...]
    pulls: bool = False
    base: str | None = None

    def only(self, tensors: Container[str]) -> SharedShards:
        """The same memory with nothing in it but these tensors."""
        holdings = tuple(holding for holding in self.shards.holdings if holding.tensor in tensors)
        return replace(self, shards=replace(self.shards, holdings=holdings, aliases=()))
