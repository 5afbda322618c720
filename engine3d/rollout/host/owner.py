"""The client of one host process of an engine: its start, in a `with` block or by itself, and its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from engine3d.errors import EngineError
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.host.process import HostProcess


class HostOwner(ABC):
    """A client of an engine, or of its part on one host.

    Args:
        config: of the engine.
        log_path: where all that its processes print goes; a temporary file, kept when they die, if None.
    """

    def __init__(self, config: RolloutConfig, log_path: str | Path | None) -> None:
        self.config = config
        self._log_path = Path(log_path) if log_path is not None else None
        self._host: HostProcess | None = None

    @abstractmethod
    def start(self) -> Self:
        """Start it and wait until it is up. Raises EngineError after `start_timeout_s` at the latest."""

    def is_alive(self) -> bool:
        """True if its process runs, even while it is busy or stuck."""
        return self._host is not None and self._host.is_alive

    def shutdown(self) -> None:
        """End it and everything that it started; by force after `shutdown_timeout_s`. Idempotent."""
        if self._host is None or not self._host.is_alive:
            return
        self._host.shutdown(self.config.shutdown_timeout_s)
        if self._log_path is None:
            self._host.log_path.unlink(missing_ok=True)  # nothing went wrong that it could tell of

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _running(self) -> HostProcess:
        if self._host is None:
            raise EngineError("rollout engine was not started")
        return self._host
