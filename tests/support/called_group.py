"""A group of ranks as tests call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridflow.workers.worker_group import WorkerGroup


class CalledGroup(WorkerGroup):
    """A group whose methods have the types of calls at large: those of its worker class are known when it starts."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
