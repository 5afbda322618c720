"""Engines of a stream that were lost: they are started again, and get the weights that the others serve."""

from __future__ import annotations

from typing import Any

from hybridflow.errors.log import log
from hybridflow.roles.groups import RolloutGroup
from hybridflow.trainer.weight_sync import WeightSync
from hybridflow.workers.future import Future


class EngineRestarts:
    """Restarts of a run's engines.

    Args:
        rollout: the engines.
        weights: brings them the actor's.
    """

    def __init__(self, rollout: RolloutGroup, weights: WeightSync) -> None:
        self._rollout, self._weights = rollout, weights
        self._starting: dict[int, Future[Any]] = {}

    def begin(self, engine: int, cause: str) -> None:
        """Start an engine again while the others and the models work.

        Args:
            engine: its number.
            cause: what it failed of.
        """
        log.warning(f"rollout engine {engine} is lost and is started again, the others continue: {cause}")
        self._weights.leave(engine)
        self._starting[engine] = self._rollout.engines([engine]).restart()

    def started(self, *, wait: bool = False) -> list[int]:
        """Engines that can generate again but for their weights, each reported once.

        Args:
            wait: for all that are started.

        Raises:
            EngineError: one could not be started.
        """
        engines = [engine for engine, future in self._starting.items() if wait or future.done()]
        for engine in engines:
            self._starting.pop(engine).result()
        return engines

    def give_weights(self, engine: int, version: int) -> None:
        """Bring an engine that has started to the version that all others serve.

        Raises:
            EngineError: it failed.
        """
        self._weights.rejoin(engine, version)
        log.info(f"rollout engine {engine} serves again, weights version {version}")
