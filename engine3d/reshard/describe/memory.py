"""Shards together with the means to reach their memory from another process."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    shards: RankShards
    handles: tuple[MemoryHandle | None, ...]
    pulls: bool = False
