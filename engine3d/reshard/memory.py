"""Shards together with the means to reach their memory from another process."""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.platform.interface import MemoryHandle
from engine3d.reshard.shards import Shards


@dataclass(frozen=True, slots=True)
class SharedShards:
    """A rank's shards and, for each buffer, the handle that maps it in another process of the node.

    A buffer that is another rank's memory has None.
    """

    shards: Shards
    handles: tuple[MemoryHandle | None, ...]
