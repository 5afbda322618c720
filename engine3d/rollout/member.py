"""A shard of a rollout engine on another host than its first, as its client sees it: start, follow, shut down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from engine3d.errors import UserError
from engine3d.rollout import launch
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.host.owner import HostOwner
from engine3d.rollout.shard import EngineShard


class EngineMember(HostOwner):
    """The ranks of an engine on another host than its first: SGLang's front end on that host makes their calls."""

    def __init__(
        self,
        model_dir: str | Path,
        config: RolloutConfig,
        devices: Sequence[int] = (),
        log_path: str | Path | None = None,
        weight_sources: Sequence[Path | None] = (),
        *,
        shard: EngineShard,
    ) -> None:
        """Check everything that can be checked without starting anything. The arguments are those of `RolloutEngine`.

        `shard`: any but the first.
        """
        if shard.index == 0:
            raise UserError("shard 0 of a rollout engine is a RolloutEngine, expected another shard")
        launch.check_shard(config, shard, devices, weight_sources)
        super().__init__(config, log_path)
        self._shard, self._devices = shard, tuple(devices)
        self._model = launch.read_model(Path(model_dir).resolve(), weights_needed=config.loads_weights)
        self._weight_sources = tuple(weight_sources)

    def start(self) -> Self:
        """Start the ranks, and wait until they have met the others and loaded the model.

        Raises:
            EngineError: after `start_timeout_s` at the latest.
        """
        if self._host is not None:
            raise UserError("this shard of the rollout engine was started already")
        self._host = launch.start_host(
            self.config, self._model, self._devices, self._weight_sources, self._shard, self._log_path
        )
        self._host.wait_until_up(self.config.start_timeout_s)
        return self

    def check(self, phase: str) -> None:
        """Raise EngineError, in one line that names the phase, if the ranks are not there."""
        self._running().check(phase)
