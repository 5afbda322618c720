"""Rank context of a worker, and the answers of a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.layout import Coordinates, Layout
from hybridflow.metrics.timeline import TimelineSpan


def _unwatched(method: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Rank context of a worker, the first argument of its constructor."""

    role: str
    rank: int
    local_rank: int
    """Position among the role's ranks on this node."""
    layout: Layout
    coordinates: Coordinates
    devices: tuple[int, ...]
    """Indices of the rank's devices among those that its process sees; a rank of a training role has one."""
    store: str
    """Address of the store that the role's ranks meet at, for `engine3d.rendezvous`; empty for a role without one."""
    log_path: Path | None
    at_work: Callable[[str], AbstractContextManager[None]] = _unwatched
    """Makes a block count as a call of this method, for those who watch the rank."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Status of a call that went well on one rank, for the driver."""

    span: TimelineSpan
    summary: Any
    """Summary of the result (`columns.Summary`); None without one."""
