"""What a rank is told, and what it answers."""

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
class Failure:
    """Why a call failed on one rank."""

    role: str
    rank: int
    method: str
    error: str
    """The exception as one line: its type and message, or the message alone where the user can put it right."""
    user_error: bool
    time: float
    """When it was caught, in seconds since the epoch."""
    stack: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the driver is told of a call that went well on one rank."""

    span: Span
    summary: Any
    """Of the result (`columns.Summary`), None if it has none."""
