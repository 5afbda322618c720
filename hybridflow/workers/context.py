"""Rank context of a worker, and what its rank answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.layout import Coordinates, Layout
from hybridflow.metrics.timeline import Span


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker is told about itself; the first argument of its constructor."""

    role: str
    rank: int
    local_rank: int
    """Position among the role's ranks on this node."""
    layout: Layout
    coordinates: Coordinates
    devices: tuple[int, ...]
    """Indices of the rank's devices among those that its process sees; a rank of a training role has one."""
    store: str
    """Where the ranks of the role meet, as an address of `engine3d.stores`; empty for one that was not to have any."""
    log_path: Path | None

    @property
    def world_size(self) -> int:
        return self.layout.world_size


@dataclass(frozen=True, slots=True)
class Answer:
    """What the driver is told of a call that went well on one rank."""

    span: Span
    summary: Any
    """Of the result (`columns.Summary`), None if it has none."""
