"""A part of a rollout engine on another host than its first, as its client sees it: start, follow, shut down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from engine3d.errors import EngineError, UserError
from engine3d.rollout import launch
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.host.process import HostProcess
from engine3d.rollout.part import EnginePart


class EngineMember:
    """The ranks of an engine on another host than its first: SGLang's front end on that host makes their calls."""

    def __init__(
        self,
        model_dir: str | Path,
        config: RolloutConfig,
        devices: Sequence[int] = (),
        log_path: str | Path | None = None,
        weight_sources: Sequence[Path | None] = (),
        *,
        part: EnginePart,
    ) -> None:
        """Check everything that can be checked without starting anything. The arguments are those of `RolloutEngine`.

        `part`: any but the first.
        """
        if part.index == 0:
            raise UserError("part 0 of a rollout engine is a RolloutEngine, expected another part")
        launch.check_part(config, part, devices, weight_sources)
        self.config, self._part, self._devices = config, part, tuple(devices)
        dummy = config.server_args.get("load_format") == "dummy"
        self._model = launch.read_model(Path(model_dir).resolve(), weights_needed=not dummy)
        self._weight_sources = tuple(weight_sources)
        self._log_path = Path(log_path) if log_path is not None else None
        self._host: HostProcess | None = None

    def start(self) -> Self:
        """Start the ranks, and wait until they have met the others and loaded the model.

        Raises:
            EngineError: after `start_timeout_s` at the latest.
        """
        if self._host is not None:
            raise UserError("this part of the rollout engine was started already")
        self._host = launch.start_host(
            self.config, self._model, self._devices, self._weight_sources, self._part, self._log_path
        )
        self._host.wait_until_up(self.config.start_timeout_s)
        return self

    def check(self, phase: str) -> None:
        """Raise EngineError, in one line that names the phase, if the ranks are not there."""
        if self._host is None:
            raise EngineError("rollout engine was not started")
        self._host.check(phase)

    def is_alive(self) -> bool:
        """Whether the process of the ranks runs. True too while it is busy or stuck."""
        return self._host is not None and self._host.is_alive

    def shutdown(self) -> None:
        """End the ranks and everything that they started; by force after `shutdown_timeout_s`. Idempotent."""
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
