"""One rank of a stage whose module is a plain class or function. Imports nothing large: every rank imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import DP_PROTO, register


class StageWorker:
    """Calls the module with this rank's part of the data.

    Args:
        context: the rank.
        module: a function, or a class that is built here without arguments and is then called.
    """

    def __init__(self, context: WorkerContext, module: Callable[..., Any]) -> None:
        self._call = module() if isinstance(module, type) else module

    @register(DP_PROTO)
    def process(self, *batches: Any) -> Any:
        """Return the module's output for this rank's shard of each batch."""
        return self._call(*batches)

    @register(DP_PROTO)
    def make(self, *, step: int) -> Any:
        """Return the output of the module, a source, for a step, from 1."""
        return self._call(step)
